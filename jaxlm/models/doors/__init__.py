"""The doors: the functions through which every model computes, one file per operation.

A door takes arrays and parameters, pins the sharding of its results by their logical axes, bears its name in profiles
and for rematerialisation, and chooses its implementation. Between doors a model holds mathematics alone.
"""

from jaxlm.models.doors.activation import activation as activation
from jaxlm.models.doors.activation import gated as gated
from jaxlm.models.doors.attention import attention as attention
from jaxlm.models.doors.attention import named_heads as named_heads
from jaxlm.models.doors.by_head import by_head as by_head
from jaxlm.models.doors.elementwise import Dropout as Dropout
from jaxlm.models.doors.elementwise import add as add
from jaxlm.models.doors.elementwise import scale as scale
from jaxlm.models.doors.expert_rows import sort_by_expert as sort_by_expert
from jaxlm.models.doors.experts import from_experts as from_experts
from jaxlm.models.doors.experts import to_experts as to_experts
from jaxlm.models.doors.gather import gather as gather
from jaxlm.models.doors.heads import kv_heads as kv_heads
from jaxlm.models.doors.heads import repeat_heads as repeat_heads
from jaxlm.models.doors.linear import linear as linear
from jaxlm.models.doors.logits import logits as logits
from jaxlm.models.doors.look_up import look_up as look_up
from jaxlm.models.doors.loss import cross_entropy as cross_entropy
from jaxlm.models.doors.loss import token_losses as token_losses
from jaxlm.models.doors.norm import norm as norm
from jaxlm.models.doors.rope import RopeTable as RopeTable
from jaxlm.models.doors.rope import rope as rope
from jaxlm.models.doors.route import Choice as Choice
from jaxlm.models.doors.route import Routes as Routes
from jaxlm.models.doors.route import route as route
from jaxlm.models.doors.select import select as select
from jaxlm.models.doors.sent_rows import passes_needed as passes_needed
from jaxlm.models.doors.sent_rows import send_to_experts as send_to_experts
from jaxlm.models.doors.sent_rows import sends_rows as sends_rows

"""DeepSeek-V4: streams mixed around each sublayer, windows beside compressed entries, experts by scores or by token.

Source: DeepSeek-AI 2026, DeepSeek-V4; config and tensor names as its checkpoints', official or re-saved by
transformers' DeepseekV4ForCausalLM.
"""

from rorqual.models.deepseek_v4.config import read_config
from rorqual.models.deepseek_v4.model import build

__all__ = ["build", "read_config"]

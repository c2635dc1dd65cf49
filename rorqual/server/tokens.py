"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rorqual.server.chat import render
from rorqual.server.errors import DECLARED, bad_value
from rorqual.server.schemas.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)
from rorqual.server.serving import serving

router = APIRouter(tags=["tokens"], responses=DECLARED)


@router.post("/tokenize", response_model_exclude_unset=True)
async def tokenize(request: Request, body: TokenizeRequest) -> TokenizeAnswer:
    """Ids of a prompt, or of a conversation as /v1/chat/completions would send it to the model."""
    state = serving(request)
    state.model_name(body.model)
    state.note_unknown(body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_value("either prompt or messages is required, and not both", param="prompt")
    if body.messages is not None:
        prompt = await render(
            state,
            body.messages,
            tools=body.tools,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            add_special_tokens=body.add_special_tokens,
        )
        ids = prompt.token_ids
    else:
        special = body.add_special_tokens is not False
        ids = await state.encode(body.prompt or "", add_special_tokens=special, param="prompt")
    answer = TokenizeAnswer(count=len(ids), max_model_len=state.info.max_model_len, tokens=ids)
    if body.return_token_strs:
        answer.token_strs = [state.tokenizer.token_text(token_id) for token_id in ids]
    return answer


@router.post("/detokenize")
async def detokenize(request: Request, body: DetokenizeRequest) -> DetokenizeAnswer:
    """The text of token ids, special tokens and all."""
    state = serving(request)
    state.model_name(body.model)
    state.note_unknown(body)
    size = state.info.vocab_size
    wrong = next((t for t in body.tokens if not 0 <= t < size), None)
    if wrong is not None:
        raise bad_value(f"tokens must be ids of this model's vocabulary, 0 to {size - 1}, got {wrong}", param="tokens")
    return DetokenizeAnswer(prompt=state.tokenizer.decode(body.tokens, skip_special_tokens=False))


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> TokenizerInfo:
    """What a client needs that tokenizes by itself."""
    state = serving(request)
    tokenizer, info = state.tokenizer, state.info
    return TokenizerInfo(
        bos_token=tokenizer.named_tokens.get("bos_token"),
        eos_token=tokenizer.named_tokens.get("eos_token"),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=info.eos_token_ids,
        vocab_size=info.vocab_size,
        chat_template=tokenizer.chat_templates.get("default"),
    )

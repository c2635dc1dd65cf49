"""Engine: requests in, tokens out. step() schedules, builds, runs, samples and updates."""

from __future__ import annotations

import atexit
import secrets
import time
import weakref
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rorqual.batch import ExchangeSize
from rorqual.cache.block_pool import BlockPool
from rorqual.cache.manager import CacheManager, GroupPool
from rorqual.cache.sizing import bytes_per_sequence, bytes_per_token
from rorqual.config import EngineConfig
from rorqual.distributed.world import RankFailure, World, start_world
from rorqual.engine.answer import Answer, AnswerRows
from rorqual.engine.batch_builder import Unread, build_batch, input_ids_of
from rorqual.engine.decode_rows import DecodeRows, num_leading_rows
from rorqual.engine.flight import Flight
from rorqual.engine.model_files import ModelFiles, open_model, timed
from rorqual.engine.model_runner import ModelRunner
from rorqual.engine.pacing import Pacing
from rorqual.engine.sampler import PROMPT_BLOCK, Drawn, Sampler, SamplerOutput, TokenLogprobs, prompt_logprobs
from rorqual.engine.scheduler import Scheduler
from rorqual.engine.step_stats import StepStats
from rorqual.engine.transfer import upload
from rorqual.loader.checkpoint import Checkpoint
from rorqual.loader.json_file import read_json_object
from rorqual.ops.native.library import missing_on
from rorqual.outputs import Logprob, RequestOutput, RequestTimes, StreamDelta
from rorqual.platform import describe_device, keep_freed_memory, usable_cores
from rorqual.sampling_params import SamplingParams
from rorqual.sequence import Chunk, Sequence
from rorqual.structured import Grammar, GrammarCompiler
from rorqual.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class _Request:
    output: RequestOutput
    answers: list[Answer]
    params: SamplingParams
    on_finish: Callable[[RequestOutput], None]


class Engine:
    """One model, its cache, and the requests that share them. Not thread-safe: one caller at a time.

    Of several ranks each has an engine, and all of them the same requests: the first one's calls are told to the
    others, which repeat them (`follow`). So every rank schedules, samples and keeps its books alike, and only
    activations are exchanged in a step.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles | None = None,
        *,
        progress: bool = False,
        world: World | None = None,
    ) -> None:
        """Load the model. `files` is what `open_model` made of the config; by default it is asked now. `world` is this
        rank's place; by default it is the first, and the others are started.

        Raises RankFailure where another rank fails meanwhile.
        """
        files = files or open_model(config)
        self.config = config
        self._world = world or start_world(config)
        try:
            self._load(files, progress=progress)
        except ValueError:  # every rank meets it, and the first one tells
            self._world.abandon("the engine was not loaded")
            raise
        except Exception as error:
            if self._world.mesh.world_size == 1:
                raise
            raise self._world.explain(error) from error
        except BaseException:
            self._world.abandon("loading was interrupted")
            raise
        if self._world.mesh.world_size > 1:  # for those who do not close it
            atexit.register(_close, weakref.ref(self))
        self._world.started()

    def _load(self, files: ModelFiles, *, progress: bool) -> None:
        config = self.config
        self.stats = StepStats()
        self.start_seconds = files.seconds
        """Start-up time by stage."""
        # The pool of torch's threads belongs to the process; every engine in it wants the same number.
        if torch.get_num_threads() != (threads := config.threads or max(1, usable_cores() // self._world.local_size)):
            torch.set_num_threads(threads)
        keep_freed_memory()
        self.path, self.tokenizer, checkpoint = files.path, files.tokenizer, files.checkpoint
        with timed(self.start_seconds, "weights"):
            self._runner = ModelRunner(config, checkpoint, progress=progress, world=self._world)
        with timed(self.start_seconds, "warm-up"):
            self.kernels = self._runner.warm_up()
            """Op -> backend that this model's calls get."""
        self.resolved, self._balancer = self._runner.resolved, self._runner.balancer
        self.generation_config = checkpoint.generation_config
        self.eos_token_ids = _eos_token_ids(checkpoint, self.tokenizer)
        self.vocab_size = self._runner.model.vocab_size
        pools = [
            GroupPool(BlockPool(n), g.paging(self.resolved.block_size), g.spec.retention)
            for g, n in zip(self.resolved.groups, self.resolved.num_blocks, strict=True)
        ]
        self.cache = CacheManager(
            pools,
            block_size=self.resolved.block_size,
            enable_prefix_caching=self.resolved.enable_prefix_caching,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_batched_tokens=self.resolved.max_num_batched_tokens,
            max_num_seqs=self.resolved.max_num_seqs,
            long_prefill_token_threshold=self.resolved.long_prefill_token_threshold,
        )
        self._decode_buffer = self._runner.decode_buffer
        self._sampler = Sampler(self.vocab_size)
        self._looks_ahead = self.resolved.async_scheduling
        self._flight: Flight | None = None
        self._landed: Flight | None = None
        """The step before, if all of it was read before anything else was scheduled."""
        self._pacing = Pacing()
        self._grammars = (
            GrammarCompiler(self.tokenizer, self.vocab_size, self.eos_token_ids) if self.tokenizer else None
        )
        self._requests: dict[str, _Request] = {}
        self._answer_of: dict[Sequence, tuple[_Request, Answer]] = {}
        self._next_id = 0
        self._num_started = 0
        self._others_work = False

    # ---- ranks -------------------------------------------------------------------------------------------------

    def _tell(self, name: str, *args: Any) -> None:
        """Have the other ranks repeat a call before their next step."""
        if (control := self._world.control) is not None and control.leads:
            control.put(name, *args)

    def follow(self) -> None:
        """Repeat the first rank's calls until it closes. Raises RankFailure where another rank is lost."""
        control = self._world.control
        assert control is not None
        assert not control.leads
        while True:
            for name, args in ((call.name, call.args) for call in control.receive()):
                if name == "close":
                    return
                if name == "step":
                    self.step()
                elif name == "add_request":
                    ids, params, options = args
                    self.add_request(ids, SamplingParams(**params), **options)
                elif name == "abort":
                    self.abort(*args)
                else:
                    assert name == "reset_prefix_cache", name
                    self.reset_prefix_cache()

    def check(self) -> None:
        """Raise RankFailure if another rank has failed since; nothing can be computed any more."""
        self._world.check()

    def when_rank_fails(self, callback: Callable[[], None]) -> None:
        """Have this called, in another thread, when a rank fails; `check` says how."""
        self._world.on_failure = callback

    def close(self) -> None:
        """End the other ranks. More calls do nothing."""
        control = self._world.control
        if control is not None and control.leads and self._world.failure is None:
            with suppress(RuntimeError):  # one that is gone need not be told
                self._tell("close")
                control.send()
        self._world.close()

    def _prompt_limit(self) -> int | None:
        """As `Pacing` says; of several ranks, whose clocks differ, the first one's."""
        limit = self._pacing.prompt_limit(self.scheduler.num_prompts)
        return limit if self._world.control is None else self._world.control.first_says(limit)

    def _compare(self, seqs: SequenceOf[Sequence], stops: Iterable[int]) -> None:
        """With `check_ranks`, raise RankFailure unless all ranks are about to compute the same."""
        if self._world.control is None or not self.config.check_ranks:
            return
        self._num_started += 1
        what = [(seq.seq_id, int(stop), seq.token_ids[-1]) for seq, stop in zip(seqs, stops, strict=True)]
        said = self._world.control.all_say(zlib.crc32(repr((self._num_started, what)).encode()))
        others = [rank for rank, numbers in zip(self._world.mesh.tp_ranks, said, strict=True) if numbers != said[0]]
        if others:
            raise RankFailure(
                f"step {self._num_started}: rank {', '.join(map(str, others))} is about to compute something else than "
                f"rank {self._world.mesh.tp_ranks[0]}, which has {what[:8]}"
            )

    def _agree(self, num_tokens: int, *, decodes: bool) -> ExchangeSize | None:
        """Begin a step together with the replicas that share experts; None where there are none, or nobody has any
        token. decodes: whether all of this replica's tokens are the next ones of sequences."""
        if self._world.replicas is None:
            return None
        said = self._world.replicas.all_say(num_tokens, int(decodes))
        most_tokens = max(tokens for tokens, _ in said)
        self._others_work = most_tokens > 0
        # Buffers of one size travel whole, to every rank: between hosts that costs more than to wait for counts.
        on_one_host = self._world.local_size == self._world.mesh.world_size
        fixed = on_one_host and all(kind for _, kind in said)
        return ExchangeSize(most_tokens, fixed) if most_tokens else None

    @property
    def steps_with_others(self) -> bool:
        """Whether `step` is to be called even without a request, as other replicas wait for this one in theirs."""
        return self._world.replicas is not None

    @property
    def others_work(self) -> bool:
        """Whether any replica had a token in the last step."""
        return self._others_work

    # ---- requests ----------------------------------------------------------------------------------------------

    def prepare(self, params: SamplingParams) -> Future[Grammar] | None:
        """Begin to compile what a request needs, on another thread, so that no step waits for it; None if it needs
        nothing. Give the result to `add_request`; the future raises the ValueError that `add_request` would.
        """
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ValueError("structured_outputs need a tokenizer, and this model was loaded without one")
        return self._grammars.prepare(params.structured_outputs)

    def add_request(
        self,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        cache_salt: str = "",
        streamed: bool = False,
        grammar: Grammar | None = None,
        on_finish: Callable[[RequestOutput], None] = lambda _output: None,
    ) -> str:
        """Queue a request and return its id; `on_finish` is called once, with the whole output.

        grammar: what `prepare` made for this request; without it structured outputs are compiled now.
        streamed: somebody reads the tokens as they come, which `step` returns then; steps beside it carry fewer tokens
            of other prompts.

        Raises ValueError, and changes nothing, when it can never be served: empty, ids outside the vocabulary, longer
        than the context or the cache, sampling options that this model does not have.
        """
        ids = self._check_prompt(prompt_token_ids)
        params.validate_for(self.vocab_size, self.config.max_logprobs)
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise ValueError("stop and bad_words need a tokenizer, and this model was loaded without one")
        max_len = min(self.resolved.max_model_len, len(ids) + (params.max_tokens or self.resolved.max_model_len))
        request_id = f"req-{self._next_id}"
        seed = self._base_seed(params)
        sequences = [
            Sequence(
                self._next_id + i,
                list(ids),
                len(ids),
                max_len,
                cache_salt=cache_salt,
                reads_prefix_cache=params.prompt_logprobs is None,
                is_streamed=streamed,
            )
            for i in range(params.n)
        ]
        if why := self.scheduler.why_never_fits(sequences[0]):
            raise ValueError(why)
        eos = self.eos_token_ids
        if grammar is None and (preparing := self.prepare(params)) is not None:
            grammar = preparing.result()
        answers = [
            Answer(seq, i, params, tokenizer=self.tokenizer, eos_token_ids=eos) for i, seq in enumerate(sequences)
        ]
        output = RequestOutput(
            request_id, prompt, list(ids), [a.output for a in answers], RequestTimes(time.perf_counter())
        )
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None] * len(ids)
        request = _Request(output, answers, params, on_finish)
        end_ids = [*(() if params.ignore_eos else eos), *(params.stop_token_ids or ())]
        bad_words = self._bad_words(params)
        for i, seq in enumerate(sequences):
            seq.sampler_slot = self._sampler.add(
                params,
                seed=(seed + i * _SEED_STRIDE) % 2**64,
                prompt_token_ids=ids,
                end_token_ids=end_ids,
                bad_words=bad_words,
                matcher=grammar.matcher(ignore_eos=params.ignore_eos) if grammar is not None else None,
            )
            self.scheduler.add(seq)
            self._answer_of[seq] = (request, answers[i])
        self._requests[request_id] = request
        self._next_id += params.n
        given = params.model_dump(exclude_unset=True, mode="json") | {"seed": seed}
        self._tell("add_request", ids, given, {"cache_salt": cache_salt, "streamed": streamed})
        return request_id

    def abort(self, request_id: str) -> None:
        """End a request's running answers with finish_reason "abort". Unknown or finished ids do nothing."""
        if (request := self._requests.get(request_id)) is not None:
            self._tell("abort", request_id)
            for answer in request.answers:
                if not answer.finished:
                    answer.end("abort")
                    self._retire(request, answer)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix."""
        self._tell("reset_prefix_cache")
        self.cache.forget_prefixes()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return self.scheduler.has_work

    def _check_prompt(self, prompt_token_ids: SequenceOf[int]) -> list[int]:
        ids = list(prompt_token_ids)
        if not ids:
            raise ValueError("the prompt is empty: it must have at least one token")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= self.vocab_size:  # else nothing is to be asked
            for token in ids:
                is_number = isinstance(token, int | np.integer) and not isinstance(token, bool)
                if not is_number or not 0 <= token < self.vocab_size:
                    raise ValueError(
                        f"prompt token {token!r} is out of vocabulary: ids are integers from 0 to {self.vocab_size - 1}"
                    )
            ids = [int(token) for token in ids]
        if len(ids) >= self.resolved.max_model_len:
            raise ValueError(
                f"the prompt has {len(ids)} tokens and the context holds {self.resolved.max_model_len} (prompt and "
                "output): shorten the prompt or raise --max-model-len"
            )
        return ids

    def _base_seed(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed
        if self.config.seed is not None:
            return (self.config.seed * 0x9E3779B97F4A7C15 + self._next_id) % 2**64
        return secrets.randbits(64)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word's tokens, at the start of a text and after a space."""
        found: list[list[int]] = []
        for word in params.bad_words or ():
            assert self.tokenizer is not None
            for text in dict.fromkeys((word, " " + word.lstrip())):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in found:
                    found.append(ids)
        return found

    # ---- steps -------------------------------------------------------------------------------------------------

    @torch.inference_mode()  # always, so that what one step keeps another may write to, whatever mode the caller is in
    def step(self) -> list[StreamDelta]:
        """Move every running sequence on; returns what each answer of a streamed request gained.

        With `async_scheduling` the device works on a step while the one before is read: a call that only starts one
        returns [] too, and an answer's end is found when its next token is computed already, which is dropped.

        Raises RankFailure where another rank is lost; nothing can be computed any more then.
        """
        if self._world.mesh.world_size == 1:
            return self._step()
        self._world.check()
        try:
            if (control := self._world.control) is not None and control.leads:
                control.put("step")
                control.send()
            return self._step()
        except Exception as error:
            raise self._world.explain(error) from error
        except BaseException:  # Ctrl-C: the other ranks are in the middle of the step, and stay there
            self._world.abandon("a step was interrupted: make a new engine")
            raise

    def _step(self) -> list[StreamDelta]:
        start = time.perf_counter()
        flight = self._flight
        if flight is None:
            flight, stage = self._fly_first(), "sample"
            if flight is None:
                return []
            flight.seconds_to_start = time.perf_counter() - start
            if self._can_fly_ahead(flight):
                self._flight = flight
                return []
        else:
            self._flight, stage = self._fly_ahead(flight), "wait"  # where this raises, the flight can still be read
            if self._flight is not None:
                self._flight.seconds_to_start = time.perf_counter() - start
        reading = time.perf_counter()
        with self.stats.stage(stage):
            drawn = flight.drawn.wait()
        deltas = self._land(flight, drawn)
        goes_on = self._flight is None and not flight.has_departed and self._answer_of
        self._landed = flight if goes_on else None
        self.stats.num_steps += 1
        self._pacing.record(
            num_decodes=flight.num_decodes,
            num_prompt_tokens=flight.num_prompt_tokens,
            seconds=flight.seconds_to_start + time.perf_counter() - reading,
        )
        return deltas

    # ---- starting a step; with `async_scheduling` before the one before is read

    def _can_fly_ahead(self, flight: Flight) -> bool:
        """Whether another step may start before this one's tokens are read."""
        if not self._looks_ahead or flight.has_departed:
            return False
        rows = flight.decodes
        if rows is not None and not flight.prompts:
            return self._sampler.can_draw_later(rows.sampler_slots)
        return self._sampler.can_draw_later(np.array([seq.sampler_slot for seq in flight.drawing], np.int64))

    def _fly_first(self) -> Flight | None:
        """Start a step when none is in flight."""
        landed, self._landed = self._landed, None
        if landed is not None and (flight := self._go_on(landed, token_ids=None)) is not None:
            return flight
        with self.stats.stage("schedule"):
            chunks = self.scheduler.schedule(self._prompt_limit())
        return self._take_off(chunks)

    def _fly_ahead(self, flight: Flight) -> Flight | None:
        """Start the step after one whose tokens are still on the device, if there is one."""
        if not self._can_fly_ahead(flight):
            return None
        if (after := self._go_on(flight, flight.drawn.token_ids)) is not None:
            return after
        with self.stats.stage("schedule"):
            self.scheduler.depart(chunk for chunk in flight.chunks if chunk.seq in self._answer_of)
            flight.has_departed = True
            chunks = self.scheduler.schedule(self._prompt_limit())
        return self._take_off(chunks, flight.unread)

    def _go_on(self, flight: Flight, token_ids: torch.Tensor | None) -> Flight | None:
        """Start the step after one that only decodes, where it decodes the same sequences, or those that are left.

        token_ids: what that one draws, on the device; None where it was read.
        """
        rows, answers = flight.decodes, flight.answers
        if rows is None or answers is None or flight.prompts:
            return None
        with self.stats.stage("schedule"):
            gone = [row for row, seq in enumerate(rows.seqs) if seq not in self._answer_of]
            ahead = self.scheduler.look_ahead(rows, gone)
            if ahead is None:
                return None
            if len(ahead.seqs) != len(rows.seqs):
                row_of = {seq: row for row, seq in enumerate(rows.seqs)}
                left = np.array([row_of[seq] for seq in ahead.seqs])
                answers = answers.take(left.tolist())
                if token_ids is not None:
                    token_ids = token_ids[upload([left], token_ids.device)[0]]
        return self._decode(ahead, answers, token_ids)

    def _take_off(self, chunks: list[Chunk], unread: Unread | None = None) -> Flight | None:
        """Tell the device of a step, if there is anything to compute. unread: tokens of the step before, which may be
        among these."""
        if not chunks:
            if (exchange := self._agree(0, decodes=True)) is not None:
                self._runner.run_idle(exchange)
                if self._balancer is not None:
                    self._balancer.discard()
                    self._balancer.end_step()
            return None
        # The longest contexts go first: a device that starts with them does not end up with them alone.
        num_decodes = num_leading_rows(chunks)
        chunks[:num_decodes] = sorted(chunks[:num_decodes], key=lambda chunk: -chunk.stop)
        rows = DecodeRows.of(chunks[:num_decodes])
        answers = AnswerRows([self._answer_of[seq][1] for seq in rows.seqs]) if rows is not None else None
        if rows is not None and answers is not None and num_decodes == len(chunks):
            ids = input_ids_of(chunks, unread, self.resolved.device) if unread is not None else None
            return self._decode(rows, answers, ids)
        self._compare([chunk.seq for chunk in chunks], (chunk.stop for chunk in chunks))
        exchange = self._agree(sum(chunk.num_tokens for chunk in chunks), decodes=False)
        for chunk in chunks[num_decodes:]:
            self._count_prompt(chunk)
        wants_all = [self._wants_prompt_logprobs(chunk.seq) for chunk in chunks]
        with self.stats.stage("build"):
            batch, wanted = build_batch(
                chunks, wants_all, paging=self.resolved.paging, device=self.resolved.device, unread=unread
            )
            batch = replace(batch, exchange=exchange) if exchange is not None else batch
        num_prompt_tokens = batch.num_tokens - batch.num_single_token_seqs
        self._pacing.start(num_prompt_tokens)
        with self.stats.stage("forward"):
            hidden = self._runner.hidden_states(batch)
            if self._balancer is not None:
                self._balancer.end_step()
        with self.stats.stage("sample"):
            drawn, row_of = self._draw(chunks, wanted, hidden)
        prompts = [(chunk, row_of.get(i)) for i, chunk in enumerate(chunks[num_decodes:], num_decodes)]
        return Flight(rows, answers, drawn, prompts, batch.num_single_token_seqs, num_prompt_tokens)

    def _decode(self, rows: DecodeRows, answers: AnswerRows, input_ids: torch.Tensor | None = None) -> Flight:
        """Tell the device of a step that only decodes. input_ids: where the host does not know them yet."""
        self._compare(rows.seqs, rows.stops)
        exchange = self._agree(len(rows.seqs), decodes=True)
        self._pacing.start(0)
        with self.stats.stage("build"):
            draws = self._sampler.plain_draws(rows.sampler_slots, rows.stops) if self._runner.draws else None
            batch = self._decode_buffer.fill(rows, input_ids, draws)
            batch = replace(batch, exchange=exchange) if exchange is not None else batch
        with self.stats.stage("forward"):
            logits, token_ids = self._runner.decode(batch)
            if self._balancer is not None:
                self._balancer.end_step()
        with self.stats.stage("sample"):
            if draws is not None and token_ids is not None:
                return Flight.of_decodes(rows, answers, Drawn.of(token_ids))
            return Flight.of_decodes(rows, answers, self._sampler.draw(logits, rows.sampler_slots, rows.stops))

    def _count_prompt(self, chunk: Chunk) -> None:
        """Note what the start of a chunk says about its request, and about all."""
        seq = chunk.seq
        request, answer = self._answer_of[seq]
        if request.output.times.first_scheduled_s is None:
            request.output.times.first_scheduled_s = time.perf_counter()
        if answer.output.index == 0 and not answer.output.token_ids:
            request.output.num_cached_tokens = seq.num_cached_tokens or 0
        if seq.num_output_tokens == 0 and chunk.start == (seq.num_cached_tokens or 0) and not seq.num_preemptions:
            self.stats.num_cached_tokens += seq.num_cached_tokens or 0
            self.stats.num_queried_tokens += seq.num_prompt_tokens if seq.reads_prefix_cache else 0
        if not (chunk.samples and seq.num_output_tokens):
            self.stats.num_prompt_tokens += chunk.num_tokens

    def _wants_prompt_logprobs(self, seq: Sequence) -> bool:
        request, answer = self._answer_of[seq]
        return request.output.prompt_logprobs is not None and answer.output.index == 0 and not answer.output.token_ids

    def _draw(self, chunks: list[Chunk], rows: list[range], hidden: torch.Tensor) -> tuple[Drawn, dict[int, int]]:
        """What is drawn, and its row for each index of a chunk that reaches its sequence's end."""
        first_rows = [0]
        for wanted in rows:
            first_rows.append(first_rows[-1] + len(wanted))
        for chunk, wanted, first in zip(chunks, rows, first_rows, strict=False):
            if len(wanted) and self._wants_prompt_logprobs(chunk.seq):
                self._record_prompt_logprobs(chunk.seq, wanted, hidden[first : first + len(wanted)])
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        if not sampling:
            return Drawn.of(torch.empty(0, dtype=torch.int64, device=hidden.device)), {}
        if len(sampling) != hidden.shape[0]:
            last_rows = np.array([first_rows[i + 1] - 1 for i in sampling])
            hidden = hidden[upload([last_rows], hidden.device)[0]]
        logits = self._runner.compute_logits(hidden)
        slots = np.array([chunks[i].seq.sampler_slot for i in sampling], np.int64)
        positions = np.array([chunks[i].stop for i in sampling], np.int64)
        return self._sampler.draw(logits, slots, positions), {i: row for row, i in enumerate(sampling)}

    def _record_prompt_logprobs(self, seq: Sequence, positions: range, hidden: torch.Tensor) -> None:
        """What follows from position p is about the prompt token at p + 1. No more logits are there at once than draws
        need, or a long prompt's would take gigabytes."""
        request, _ = self._answer_of[seq]
        entries, num_top = request.output.prompt_logprobs, request.params.prompt_logprobs
        assert entries is not None
        assert num_top is not None
        count = min(positions.stop, seq.num_prompt_tokens - 1) - positions.start
        at_once = max(self.resolved.max_num_seqs, PROMPT_BLOCK)
        for first in range(0, count, at_once):
            logits = self._runner.compute_logits(hidden[first : min(first + at_once, count)])
            into = slice(positions.start + 1 + first, positions.start + 1 + first + len(logits))
            found = prompt_logprobs(logits, seq.token_ids[into], num_top)
            entries[into] = [self._named(entry) for entry in found]

    # ---- reading a step

    def _land(self, flight: Flight, drawn: SamplerOutput) -> list[StreamDelta]:
        """Give a step's tokens to the answers that still go on."""
        with self.stats.stage("update"):
            deltas = self._keep(flight, drawn)
            for chunk, row in flight.prompts:
                if chunk.seq not in self._answer_of:
                    continue
                if row is not None:
                    deltas.append(self._update(chunk, self._result(chunk.seq, drawn, row)))
                elif not flight.has_departed:
                    self.scheduler.advance(chunk, ())
        return [delta for delta in deltas if delta is not None]

    def _keep(self, flight: Flight, drawn: SamplerOutput) -> list[StreamDelta | None]:
        """Give the first tokens to the answers that were begun before."""
        rows, answers = flight.decodes, flight.answers
        if rows is None or answers is None:
            return []
        if answers.push_all:
            return [self._push(rows, drawn, row) for row in range(len(rows.seqs))]
        token_ids = np.array(drawn.token_ids[: len(rows.seqs)])
        pushed = answers.to_push(token_ids) | (token_ids < 0) | (rows.stops + 1 >= rows.max_lens)
        pushed[[row for row, seq in enumerate(rows.seqs) if seq not in self._answer_of]] = True
        collected = np.flatnonzero(~pushed)
        new = token_ids[collected].tolist()
        answers.collect(collected.tolist(), new)
        for row in np.flatnonzero(answers.counts & ~pushed).tolist():
            self._sampler.accept(rows.seqs[row].sampler_slot, int(token_ids[row]))
        seqs = [rows.seqs[row] for row in collected.tolist()]
        if flight.has_departed:
            self.scheduler.learn(seqs, new)
        else:
            self.scheduler.advance_decodes(seqs, rows.stops[collected], new)
        self.stats.num_output_tokens += len(new)
        return [self._push(rows, drawn, row) for row in np.flatnonzero(pushed).tolist()]

    def _push(self, rows: DecodeRows, drawn: SamplerOutput, row: int) -> StreamDelta | None:
        """Give a row's token to its answer, if that still goes on."""
        seq, stop = rows.seqs[row], int(rows.stops[row])
        if seq not in self._answer_of:
            return None
        return self._update(Chunk(seq, stop - 1, stop), self._result(seq, drawn, row))

    def _result(self, seq: Sequence, drawn: SamplerOutput, row: int) -> tuple[int, dict[int, Logprob] | None] | str:
        """A row's token and its logprobs, or what went wrong."""
        if drawn.failed[row]:
            matcher = self._sampler.matcher(seq.sampler_slot)
            if matcher is not None:
                return f"structured_outputs: {matcher.fault}" if matcher.fault else _NO_TOKEN_LEFT
            return _NO_USABLE_LOGITS
        logprobs = drawn.logprobs[row]
        return drawn.token_ids[row], self._named(logprobs) if logprobs is not None else None

    def _named(self, found: TokenLogprobs) -> dict[int, Logprob]:
        return {
            token: Logprob(logprob, rank, self.tokenizer.token_text(token) if self.tokenizer else "")
            for token, logprob, rank in zip(found.token_ids, found.logprobs, found.ranks, strict=True)
        }

    def _update(self, chunk: Chunk, sampled: tuple[int, dict[int, Logprob] | None] | str) -> StreamDelta | None:
        """Record what a chunk's end brought; returns what its answer gained, or None if nobody reads along."""
        seq = chunk.seq
        request, answer = self._answer_of[seq]
        times, output = request.output.times, answer.output
        if isinstance(sampled, str):
            text = answer.end("error", error=sampled)
            new_ids, logprobs = [], None
        else:
            token, logprobs = sampled
            if times.first_token_s is None:
                times.first_token_s = time.perf_counter()
            self._sampler.accept(seq.sampler_slot, token)
            matcher = self._sampler.matcher(seq.sampler_slot)
            text = answer.push(token, logprobs, completes=matcher is not None and matcher.finished)
            new_ids = [token]
            self.scheduler.advance(chunk, new_ids)
            self.stats.num_output_tokens += 1
        if answer.finished:
            self._retire(request, answer)
        if not seq.is_streamed:
            return None
        return StreamDelta(
            request.output.request_id,
            output.index,
            text,
            new_ids,
            [logprobs] if logprobs is not None else None,
            output.finish_reason,
            output.stop_reason,
            output.error,
        )

    def _retire(self, request: _Request, answer: Answer) -> None:
        """Free what a finished answer holds, and close the request with its last one."""
        self.scheduler.finish(answer.seq)
        self._sampler.remove(answer.seq.sampler_slot)
        del self._answer_of[answer.seq]
        if request.output.finished:
            request.output.times.finished_s = time.perf_counter()
            del self._requests[request.output.request_id]
            request.on_finish(request.output)

    def default_sampling_params(self) -> SamplingParams:
        """SamplingParams as the model's authors recommend; the option generation_config says where."""
        if self.config.generation_config == "vllm":
            return SamplingParams()
        recommended = self.generation_config
        if self.config.generation_config != "auto":
            recommended = read_json_object(Path(self.config.generation_config) / "generation_config.json")
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        options = {name: recommended[name] for name in names if recommended.get(name) is not None}
        if recommended.get("do_sample") is False:
            options["temperature"] = 0.0
        return SamplingParams(**options)

    # ---- about itself ------------------------------------------------------------------------------------------

    def banner(self) -> str:
        """What was started, for people: model, dtype, device, kernels, memory, time per stage."""
        r, gib = self.resolved, 2**30
        blocks, concurrency = r.num_kv_tokens // r.block_size, r.num_kv_tokens / r.max_model_len
        random = " of random values" if self.config.load_format == "dummy" else ""
        stages = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.start_seconds.items())
        memory = self._runner.memory_summary()
        ranks = self._world.describe()
        slow = missing_on(r.device)
        fixed = bytes_per_sequence(r.groups, block_size=r.block_size)
        each = f"{bytes_per_token(r.groups):,.6g} bytes per token" + (f" and {fixed:,} per sequence" if fixed else "")
        return "\n".join(
            (
                f"model    {self.config.model} ({self.path})",
                f"device   {describe_device(r.device)}, {str(r.dtype).removeprefix('torch.')}",
                *([] if ranks is None else [f"ranks    {ranks}"]),
                f"kernels  {'; '.join(f'{backend}: {names}' for backend, names in self._kernels_by_backend().items())}",
                *([] if slow is None else [f"slow     {slow}"]),
                f"weights  {r.weight_bytes / gib:.2f} GiB{random}, {' and '.join(r.weight_formats)}",
                f"kv cache {r.kv_cache_bytes / gib:.2f} GiB: {blocks} blocks of {r.block_size} tokens "
                f"({r.num_kv_tokens:,} tokens, {concurrency:.1f} sequences of {r.max_model_len:,}), {each}",
                *([] if memory is None else [f"memory   {memory}"]),
                f"start    {stages}",
            )
        )

    def _kernels_by_backend(self) -> dict[str, str]:
        backends = dict.fromkeys(self.kernels.values())
        return {b: ", ".join(op for op, used in self.kernels.items() if used == b) for b in backends}


_NO_USABLE_LOGITS = "the model gave no usable logits (NaN, or every token was forbidden)"
_NO_TOKEN_LEFT = (
    "no token is left that the structured output allows and that the model (its logits may be NaN), allowed_token_ids, "
    "bad_words, logit_bias and min_tokens do not rule out"
)
_SEED_STRIDE = 0xD1342543DE82EF95
"""Distance between the seeds of a request's n answers: odd, so that all 2**64 are different."""


def _close(engine: weakref.ref[Engine]) -> None:
    if (left := engine()) is not None:
        left.close()


def _eos_token_ids(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every id that ends an answer: those of generation_config.json, config.json and the tokenizer together."""
    found: dict[int, None] = {}
    for source in (checkpoint.generation_config, checkpoint.config):
        value = source.get("eos_token_id")
        found.update(dict.fromkeys(value if isinstance(value, list) else [] if value is None else [value]))
    found.update(dict.fromkeys(tokenizer.eos_token_ids if tokenizer else ()))
    return tuple(found)

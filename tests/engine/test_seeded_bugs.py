"""The KV oracle is worth its name only if it notices bugs: each of these one-line bugs must make it fail.

Every bug is seeded into a copy of the package, so a line that changes here changes there: keep the two in step.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import rorqual

ORACLE = Path(__file__).with_name("test_kv_oracle.py")
CONFTEST = """\
from hypothesis import Phase, settings

settings.register_profile(
    "seeded", derandomize=True, database=None, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False
)
settings.load_profile("seeded")
"""


class Edit(NamedTuple):
    """`old`, which must be there exactly once, becomes `new`."""

    file: str
    old: str
    new: str


SCHEDULER, POOL, MANAGER, PREFIX = "engine/scheduler.py", "cache/block_pool.py", "cache/manager.py", "cache/prefix.py"
ROWS, PAGING = "engine/decode_rows.py", "cache/paging.py"

BUGS: dict[str, list[Edit]] = {
    # blocks
    "evicted_block_stays_findable": [Edit(POOL, "del self._block_of[node]", "pass")],
    "refcount_overwritten": [Edit(POOL, "self._refs[block] += 1", "self._refs[block] = 1")],
    "revived_blocks_uncounted": [
        Edit(POOL, "revived = sum(self._refs[block] == 0 for block in shared)", "revived = 0")
    ],
    "revived_block_stays_free": [Edit(POOL, "self._cached.pop(block, None)", "pass")],
    "shared_block_freed_with_its_first_holder": [
        Edit(POOL, "            if self._refs[block] == 0:\n", "            if True:\n")
    ],
    # prefixes
    "hit_may_cover_the_whole_prompt": [
        Edit(MANAGER, "max(0, len(seq.token_ids) - 1) // self.block_size", "len(seq.token_ids) // self.block_size")
    ],
    "published_before_computed": [
        Edit(MANAGER, "num_full = seq.num_computed_tokens // self.block_size * self.block_size",
             "num_full = min(len(seq.prefix), *map(len, seq.block_tables)) * self.block_size"),
    ],
    "published_one_block_early": [
        Edit(MANAGER, "num_full = seq.num_computed_tokens // self.block_size * self.block_size",
             "num_full = min(len(seq.prefix), -(-seq.num_computed_tokens // self.block_size)) * self.block_size"),
    ],
    "published_under_the_neighbours_name": [
        Edit(MANAGER, "publish(table[i], self._name(group, seq.prefix, i))",
             "publish(table[i], self._name(group, seq.prefix, i - 1))")
    ],
    "long_block_has_the_name_of_its_beginning": [
        Edit(MANAGER, "names[(block + 1) * (group.paging.block_tokens // self.block_size) - 1]",
             "names[block * (group.paging.block_tokens // self.block_size)]"),
    ],
    "hit_loses_rows_of_a_block_that_is_not_full": [
        Edit(MANAGER, "if num_tokens % block_tokens >= tokens_per_row:", "if False:")
    ],
    "hit_is_not_asked_of_groups_that_choose": [
        Edit(MANAGER, "if g.retention is not None or g.paging.block_tokens", "if g.paging.block_tokens")
    ],
    "salt_ignored": [Edit(MANAGER, "self._index.root(seq.cache_salt)", 'self._index.root("")')],
    "parent_missing_from_the_name": [  # the digest alone would do no harm: identity is checked too
        Edit(PREFIX, 'parent.digest if parent else b""', 'b""'),
        Edit(PREFIX, "known.parent is parent and known.tokens == tokens", "known.tokens == tokens"),
    ],
    "digest_trusted_blindly": [
        Edit(PREFIX, "digest_size=32).digest()", "digest_size=32).digest()[:1]"),
        Edit(PREFIX, "if known.parent is parent and known.tokens == tokens:", "if True:"),
    ],
    # windows
    "window_lets_go_one_token_early": [
        Edit(PAGING, "// self.period * self.period - self.back)", "// self.period * self.period - self.back + 1)")
    ],
    "state_of_the_window_is_let_go_before_it_is_complete": [
        Edit(PAGING, "num_computed // self.period * self.period - self.back", "num_computed - self.back")
    ],
    "state_of_the_window_before_is_let_go": [
        Edit(PAGING, "max(0, num_computed // self.period * self.period - self.back)",
             "max(0, num_computed // self.period * self.period - (self.back if self.period == 1 else 0))"),
    ],
    "window_passes_by_known_tokens": [
        Edit(MANAGER, "passed = group.first_block(seq.num_computed_tokens)",
             "passed = group.first_block(len(seq.token_ids))"),
    ],
    "window_hit_lacks_its_first_block": [
        Edit(MANAGER, "for i in range(group.first_block(num_tokens), ",
             "for i in range(group.first_block(num_tokens + self.block_size), "),
        Edit(MANAGER, "first = group.first_block(num_tokens)",
             "first = min(group.first_block(num_tokens + self.block_size), num_tokens // group.paging.block_tokens)"),
    ],
    "window_hit_is_not_asked_for": [
        Edit(MANAGER, "if group.pool.find(self._name(group, names, i)) is None:", "if False:")
    ],
    "passed_blocks_are_given_back_again": [Edit(MANAGER, "table[i] = PASSED", "pass")],
    "passed_entries_are_given_back": [
        Edit(MANAGER, "give_back([block for block in table if block != PASSED])", "give_back(table)")
    ],
    "passed_entries_left_out_of_the_table": [Edit(MANAGER, "[PASSED] * num_passed + taken", "taken")],
    "passed_blocks_are_held_for_ever": [
        Edit(MANAGER, "group.pool.give_back(table[first:passed].tolist())", "pass")
    ],
    # reserving
    "last_token_gets_no_slot": [Edit(MANAGER, "group.paging.blocks_for(stop) - len(table)",
                                     "group.paging.blocks_for(stop - 1) - len(table)")],
    "reserved_in_one_group_only": [Edit(MANAGER, "if not all(g.pool.can_take", "if not any(g.pool.can_take")],
    # steps
    "rejected_drafts_count_as_computed": [
        Edit(SCHEDULER, "seq.num_computed_tokens = len(seq.token_ids) - 1", "seq.num_computed_tokens = chunk.stop")
    ],
    "drafts_beyond_max_len": [
        Edit(SCHEDULER, "min(spare, seq.max_len - len(seq.token_ids) - 1)", "spare"),
    ],
    "drafts_beyond_the_step": [
        Edit(SCHEDULER, "spare -= len(seq.draft_token_ids)", "pass"),
    ],
    "preempted_sequence_keeps_its_blocks": [
        Edit(SCHEDULER, "        self.cache.release(seq)\n        self.waiting", "        self.waiting")
    ],
    "preempted_sequence_is_still_computed": [Edit(SCHEDULER, "            chunks.pop(victim, None)\n", "")],
    "preempted_prompt_is_still_computed": [Edit(SCHEDULER, "if share > 0 and seq.block_tables:", "if share > 0:")],
    "oldest_is_preempted": [Edit(SCHEDULER, "victim = self.running[-1]", "victim = self.running[0]")],
    "finished_sequence_keeps_its_blocks": [
        Edit(SCHEDULER, "            self.running.remove(seq)\n            self.cache.release(seq)\n",
             "            self.running.remove(seq)\n"),
    ],
    "budget_ignored": [
        Edit(
            SCHEDULER,
            "budget = self.max_num_batched_tokens - sum(chunk.num_tokens for chunk in chunks.values())",
            "budget = 10**6",
        )
    ],
    # steps ahead
    "new_block_is_missing_from_the_rows": [
        Edit(ROWS, "        table[row, column] = self.seqs[row].block_tables[group][column]\n", "")
    ],
    "new_block_of_one_group_only_is_in_the_rows": [
        Edit(SCHEDULER, "rows.copy_block(row, group, stop // size)", "rows.copy_block(row, 0, stop // size)")
    ],
    "new_blocks_are_expected_in_all_groups_at_once": [
        Edit(SCHEDULER, "for group, (_, (size, _), _) in enumerate(self.cache.groups):",
             "size = self.cache.groups[0].paging.block_tokens\n        for group in range(len(self.cache.groups)):"),
    ],
    "block_of_the_step_ahead_is_not_reserved": [
        Edit(SCHEDULER, "if not self.cache.reserve(rows.seqs[row], stop + 1):",
             "if not self.cache.reserve(rows.seqs[row], stop):"),
    ],
    "blocks_are_expected_one_token_late": [Edit(SCHEDULER, "rows.stops % size == 0", "rows.stops % size == 1")],
    "finished_sequence_is_decoded_ahead": [Edit(SCHEDULER, "        goes_on[list(gone)] = False\n", "")],
    "step_ahead_behind_the_last_token": [
        Edit(SCHEDULER, "rows.stops + 1 < rows.max_lens", "rows.stops < rows.max_lens")
    ],
    "unknown_token_is_not_counted": [
        Edit(SCHEDULER, "seq.num_unknown_tokens = int(chunk.samples)", "seq.num_unknown_tokens = 0")
    ],
    "token_stays_unknown": [Edit(SCHEDULER, "            seq.num_unknown_tokens = 0\n", "")],
    "departed_chunk_is_computed_again": [
        Edit(SCHEDULER, "            seq.num_computed_tokens = chunk.stop\n", "")
    ],
    "sequence_stays_behind_its_last_token": [
        Edit(SCHEDULER, "            if seq.num_tokens == seq.max_len:\n", "            if False:\n")
    ],
    "departed_blocks_are_never_passed": [
        Edit(SCHEDULER, "            self.cache.publish(seq)\n            if seq.num_tokens",
             "            if seq.num_tokens"),
    ],
    "unknown_token_is_not_pending": [
        Edit("sequence.py", "return self.num_tokens - self.num_computed_tokens",
             "return len(self.token_ids) - self.num_computed_tokens"),
    ],
    "token_of_a_decode_is_not_counted": [Edit(SCHEDULER, "            seq.num_computed_tokens += 1\n", "")],
    "window_is_never_passed_while_decoding": [
        Edit(MANAGER, "first // paging.block_tokens > before // paging.block_tokens", "False")
    ],
    "threshold_ignored": [
        Edit(SCHEDULER, "min(self.long_prefill_token_threshold or self.max_num_batched_tokens, ", "max(1, ")
    ],
}  # fmt: skip


def run_oracle(folder: Path, edits: list[Edit]) -> subprocess.CompletedProcess[str]:
    """pytest's verdict on the oracle, against a copy of the package with these edits."""
    package = Path(rorqual.__file__).parent
    shutil.copytree(package, folder / "rorqual", ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in edits:
        path = folder / "rorqual" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file} holds {old!r} {text.count(old)} times: this list is out of step with it"
        path.write_text(text.replace(old, new))
    shutil.copy(ORACLE, folder)
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", ORACLE.name]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_oracle_passes_without_a_bug(tmp_path):
    result = run_oracle(tmp_path, [])
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_oracle_notices(bug, tmp_path):
    result = run_oracle(tmp_path, BUGS[bug])
    assert result.returncode == 1, f"{bug} survived\n{result.stdout[-2000:]}{result.stderr[-2000:]}"
    assert "1 failed" in result.stdout, "a failed test, not a broken one"


def test_every_bug_can_still_be_seeded():
    package = Path(rorqual.__file__).parent
    for bug, edits in BUGS.items():
        for file, old, new in edits:
            assert (package / file).read_text().count(old) == 1, f"{bug}: {file} no longer holds {old!r} once"
            assert old != new

"""What Store counts since start, with the sentence that metrics show."""

from kvstore.core.loans import LoanProblem
from kvstore.core.moves import FAILURES

COUNTERS = {
    "hit_blocks_total": "Blocks asked for by match and found.",
    "miss_blocks_total": "Blocks asked for by match and not found.",
    "acquired_blocks_total": "Blocks granted to readers.",
    "reserved_blocks_total": "Slots granted to writers.",
    "held_blocks_total": "Blocks that writers offered and the store held already.",
    "stored_blocks_total": "Blocks committed.",
    "aborted_blocks_total": "Slots given back by their writer without a commit.",
    "expired_blocks_total": "Slots whose writer's lease expired before the commit.",
    "evicted_blocks_total": "Blocks given up to make room.",
    "dropped_blocks_total": "Blocks removed by drop.",
    "hbm_stored_blocks_total": "Blocks that engines said are in their own pools now.",
    "hbm_removed_blocks_total": "Blocks that engines said are not there any more, or whose engine is gone.",
    "hbm_unnoted_blocks_total": "Blocks in engines' own pools that were told and not noted: there were too many.",
    "slab_read_blocks_total": "Blocks granted to readers in the slab too.",
    "slab_filled_blocks_total": "Blocks that engines copied into the slab.",
    "slab_evicted_blocks_total": "Blocks given up in the slab to make room there.",
    "pinned_blocks_total": "Blocks that pins were asked for and granted.",
    "outlived_blocks_total": "Blocks whose time to live was over.",
    "declined_blocks_no_space_total": "Blocks declined because everything else is in use.",
    "declined_blocks_orphan_total": "Blocks declined because their parent is not held.",
    "declined_blocks_leaving_total": "Blocks declined because a dropped copy of them is still being used.",
    "promoted_blocks_total": "Blocks read from a drive into RAM.",
    "demoted_blocks_total": "Blocks written to a drive.",
    "restored_blocks_total": "Blocks found on the drives at start.",
    "nvme_evicted_blocks_total": "Blocks given up on the drives to make room there.",
    "lost_blocks_total": "Blocks given up in RAM that no drive had.",
    "skipped_writes_backlog_total": "Blocks not written because too many waited.",
    "skipped_writes_no_space_total": "Blocks not written because everything on the drives is in use.",
    **{f"failed_reads_{problem}_total": f"Reads from a drive that failed: {problem}." for problem in FAILURES},
    **{f"failed_writes_{problem}_total": f"Writes to a drive that failed: {problem}." for problem in FAILURES},
    "cancelled_reads_total": "Blocks not read from a drive because nobody waited for them any more.",
    "fetched_blocks_total": "Blocks fetched from peers.",
    "retried_fetches_total": "Fetches that were asked of another peer after one had failed.",
    "suspected_peers_total": "Times that a peer failed and was left alone for a while.",
    **{
        f"failed_fetches_{problem}_total": f"Blocks that did not come from a peer: {problem}."
        for problem in LoanProblem
    },
    "recorded_lines_total": "Lines of the recording (--record).",
    "recorded_bytes_total": "Bytes of it, as they lie on disk.",
    "dropped_records_total": "Requests and stores that the recording lacks: its queue or its disk was full.",
    "granted_leases_total": "Leases granted.",
    "expired_leases_total": "Leases that expired, by time or with their connection.",
    "refused_leases_total": "Leases refused: too many, or too much in limbo.",
}


def new_counters() -> dict[str, int]:
    """All counters at 0."""
    return dict.fromkeys(COUNTERS, 0)

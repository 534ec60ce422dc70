"""Deltas written into runtime storage, each block hashed as soon as it is written.

The processor's cache still holds the block then, so that the pause reads all weights once instead
of twice. Nothing after it writes to them: what follows only derives packed forms from them. What
lies whole on a GPU is hashed there once all is written.
"""

from concurrent.futures import Executor

from harvester.contracts.clock import Clock
from harvester.contracts.errors import Corrupt
from weightsync.elements import state_hash
from weightsync.elements.batches import each
from weightsync.encoding.delta import checked_apply
from weightsync.receive.staged import Staged
from weightsync.receiver import Applied
from weightsync.vllm.loader_map import LoaderMap


def is_hashed_whole(staged: Staged) -> bool:
    """Whether digests of whole tensors lead to the published hash of a chain of deltas."""
    # A version that is stored in slices is hashed by its slices.
    expected = staged.expected
    is_whole = expected.state_hash is not None and not expected.slicing.records
    return staged.full is None and is_whole


def applied_in_place(staged: Staged, target: LoaderMap, pool: Executor, clock: Clock) -> Applied:
    """Write deltas and verify the result; for stagings that `is_hashed_whole` admits.

    Raises Corrupt if the result is not the published state; the target is then in doubt, as after
    any other failure.
    """
    started = clock.now()

    def write(name: str) -> str:
        deltas = staged.deltas.get(name, ())
        if target.flat_at(name) is None:
            if deltas:
                target.change(name, deltas)
            if name in target.hashed_there:
                return ""
            return state_hash.digest_of(target.bits(name))
        bits = target.bits(name)
        if not deltas:
            return state_hash.digest_of(bits)
        for delta in deltas[:-1]:
            checked_apply(delta, bits)
        return checked_apply(deltas[-1], bits, hashed=True)

    # Largest first, so that the pool does not end on one long tensor.
    names = sorted(staged.layout, key=lambda name: (-staged.layout[name].size_bytes, name))
    written = each(pool, write, names, lambda name: staged.layout[name].size_bytes)
    digests = dict(zip(names, written, strict=True))
    # On the pool, where work on an accelerator that production shares is asked for.
    digests |= pool.submit(target.digests_there).result()
    target.finish(staged.changed)
    found = state_hash.combined(digests, staged.layout)
    if found != staged.expected.state_hash:
        raise Corrupt(f"state {found} where {staged.expected.state_hash} was published")
    return Applied(
        version=staged.plan.target,
        state_hash=found,
        bytes_read=staged.bytes_read,
        tensors_changed=len(staged.changed),
        from_full=False,
        seconds=clock.now() - started,
    )

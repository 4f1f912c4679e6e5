"""From the calls of one session to the sequences that are trained on.

Invariant: a token has mask 1 in at most one sample, and only where it was sampled from the whole
softmax by a complete call whose evidence is whole: the prompt has its recorded digest and length,
and ids, log-probs, support and versions agree. What fails stays context, or is left out.

Shapes: N tokens of a sample.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from archon.records import Interaction

_ARRAYS = ("tokens", "mask", "logprobs", "versions", "interaction")
FULL = 0


@dataclass(frozen=True)
class Packed:
    """The content of a sample; ``leaf`` is the call that ends it."""

    leaf: str
    interactions: list[str]
    tokens: bytes
    mask: bytes
    logprobs: bytes
    versions: bytes
    interaction: bytes
    digest: str
    n_tokens: int
    n_trainable: int
    min_version: int
    max_version: int


@dataclass(frozen=True)
class Packing:
    """``gaps``: what is wrong with the evidence of which call, beyond what its row says."""

    samples: list[Packed]
    gaps: dict[str, list[str]]


def pack(taking_part: Sequence[Interaction], context: Iterable[Interaction], kind: str) -> Packing:
    """Samples of the calls that take part; ``context`` are the other calls that prefixes name."""
    every = {i.interaction_id: i for i in [*context, *taking_part]}
    prompts = _Prompts(every)
    gaps = {i.interaction_id: _gaps(i, prompts) for i in taking_part}
    usable = {
        i.interaction_id: i
        for i in taking_part
        if not gaps[i.interaction_id] and not i.evidence_gaps and FULL in i.support
    }
    if kind == "individual":
        branches = [[i] for i in usable.values()]
    else:
        branches = list(_branches(usable, every))
    trained: set[str] = set()
    samples = []
    for branch in branches:
        samples.append(_sample(branch, prompts, trained))
        trained |= {i.interaction_id for i in branch}
    return Packing(samples, {name: found for name, found in gaps.items() if found})


class _Prompts:
    """Whole prompts, put together along ``prefix_parent`` and kept."""

    def __init__(self, every: dict[str, Interaction]) -> None:
        self._every = every
        self._known: dict[str | None, bytes | None] = {}

    def prompt(self, name: str) -> bytes | None:
        """The prompt's ids, or None where a call of its prefix is missing."""
        chain: list[Interaction] = []
        at: str | None = name
        while at not in self._known:
            call = self._every.get(at or "")
            if call is None or len(chain) > len(self._every):
                self._known[at] = None
            elif call.prefix_parent is None:
                self._known[at] = call.prompt_ids
            else:
                chain.append(call)
                at = call.prefix_parent
        for call in reversed(chain):
            before = self._known[call.prefix_parent]
            self._known[call.interaction_id] = None
            if before is not None:
                parent = self._every[call.prefix_parent or ""]
                self._known[call.interaction_id] = before + parent.output_ids + call.prompt_ids
        return self._known[name]


def _gaps(call: Interaction, prompts: _Prompts) -> list[str]:
    found = []
    prompt = prompts.prompt(call.interaction_id)
    if prompt is None:
        found.append("prefix_missing")
    elif len(prompt) != 4 * call.prompt_length:
        found.append("prompt_length")
    elif hashlib.sha256(prompt).hexdigest() != call.prompt_sha256:
        found.append("prompt_sha256")
    n = len(call.support)
    if len(call.output_ids) != 4 * n or len(call.logprobs) != 4 * n:
        found.append("output_length")
    elif not np.isfinite(np.frombuffer(call.logprobs, "<f4")).all():
        found.append("logprobs_not_finite")
    end = 0
    for item in call.versions:
        if item["start"] != end or item["end"] < end:
            break
        end = item["end"]
    else:
        if end == n:
            return found
    return [*found, "versions"]


def _branches(
    usable: dict[str, Interaction], every: dict[str, Interaction]
) -> Iterable[list[Interaction]]:
    """Root to leaf, one branch per usable call that no usable call continues, by sequence."""
    chains = {name: list(_chain(call, every)) for name, call in usable.items()}
    inner = {a.interaction_id for chain in chains.values() for a in chain[1:]}
    for name, chain in chains.items():
        if name not in inner:
            yield [i for i in reversed(chain) if i.interaction_id in usable]


def _chain(call: Interaction, every: dict[str, Interaction]) -> Iterable[Interaction]:
    at: Interaction | None = call
    while at is not None:
        yield at
        at = every.get(at.prefix_parent or "")


def _sample(branch: Sequence[Interaction], prompts: _Prompts, trained: set[str]) -> Packed:
    """One sequence: the last call's prompt and output, each call of the branch in its place."""
    leaf = branch[-1]
    prompt = prompts.prompt(leaf.interaction_id)
    assert prompt is not None, f"{leaf.interaction_id} was verified"
    tokens_N = np.frombuffer(prompt + leaf.output_ids, "<i4")
    mask_N = np.zeros(len(tokens_N), np.uint8)
    logprobs_N = np.zeros(len(tokens_N), "<f4")
    versions_N = np.full(len(tokens_N), -1, "<i4")
    interaction_N = np.full(len(tokens_N), -1, "<i4")
    names: list[str] = []
    for call in branch:
        place = slice(call.prompt_length, call.prompt_length + len(call.support))
        logprobs_N[place] = np.frombuffer(call.logprobs, "<f4")
        for item in call.versions:
            versions_N[place.start + item["start"] : place.start + item["end"]] = item["version"]
        if call.interaction_id not in trained:
            mask_N[place] = np.frombuffer(call.support, np.uint8) == FULL
            interaction_N[place] = len(names)
            names.append(call.interaction_id)
    return _packed(leaf, names, tokens_N, mask_N, logprobs_N, versions_N, interaction_N)


def _packed(leaf: Interaction, names: list[str], *arrays_N: NDArray[np.generic]) -> Packed:
    tokens_N, mask_N, _, versions_N, _ = arrays_N
    used = versions_N[mask_N == 1]
    content = [array.tobytes() for array in arrays_N]
    return Packed(
        leaf=leaf.interaction_id,
        interactions=names,
        **dict(zip(_ARRAYS, content, strict=True)),
        digest=sample_digest(*content),
        n_tokens=len(tokens_N),
        n_trainable=int(mask_N.astype(np.int64).sum()),
        min_version=int(used.min()),
        max_version=int(used.max()),
    )


def sample_digest(*arrays: bytes) -> str:
    """SHA-256 over tokens, mask, logprobs, versions and interaction, in this order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array)
    return digest.hexdigest()

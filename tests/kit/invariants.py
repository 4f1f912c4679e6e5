"""Reads Postgres, lake and checkpoints, and names each invariant of the design that is broken.

Invariant: it trusts nothing that a process says of itself; digests, lengths, chains and counts are
worked out again from the rows and files. The demo and every kill test end with it.

``python -m tests.kit.invariants DATA_DIR`` prints what is broken and exits with 1.
"""

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow.parquet as pq
from psycopg.rows import dict_row

Row = dict[str, Any]


@dataclass(frozen=True)
class Violation:
    """``invariant`` is the number in the design; 0 is for plain corruption."""

    invariant: int
    where: str
    what: str

    def __str__(self) -> str:
        return f"invariant {self.invariant} broken at {self.where}: {self.what}"


@dataclass
class Acknowledged:
    """What clients were told is safe: ids of answers and of rewards, with their values."""

    interactions: set[str] = field(default_factory=set)
    rewards: dict[str, float] = field(default_factory=dict)


class _Rows:
    """Everything that the checks need, read in one snapshot."""

    def __init__(self, url: str) -> None:
        with psycopg.connect(url, row_factory=dict_row) as connection:
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            self.sessions = self._by(connection, "session", "session_id")
            self.interactions = self._by(connection, "interaction", "interaction_id")
            self.rewards = self._by(connection, "reward", "reward_id")
            self.samples = self._by(connection, "sample", "sample_id")
            self.manifests = self._by(connection, "batch_manifest", "manifest_id")
            self.versions = connection.execute("SELECT * FROM policy_version").fetchall()
            self.returns = {
                (row["interaction_id"], row["revision"]): row
                for row in connection.execute("SELECT * FROM interaction_return")
            }
        self.bodies = {name: json.loads(row["body"]) for name, row in self.manifests.items()}

    @staticmethod
    def _by(connection: psycopg.Connection[Row], table: str, key: str) -> dict[str, Row]:
        return {row[key]: row for row in connection.execute(f"SELECT * FROM {table}")}

    def committed(self) -> Iterator[tuple[str, Row]]:
        for name, row in self.manifests.items():
            if row["state"] == "committed":
                yield name, self.bodies[name]


def check_database(url: str, acknowledged: Acknowledged | None = None) -> list[Violation]:
    """Every violation that the database alone can show; an empty list when all holds."""
    rows = _Rows(url)
    checks: list[Iterable[Violation]] = [
        _claimed_once(rows),
        _tokens_once(rows),
        _evidence(rows),
        _samples_match(rows),
        _staleness(rows),
        _versions(rows),
        _manifests(rows),
        _signal(rows),
        _tenants(rows),
        _kept(rows, acknowledged or Acknowledged()),
    ]
    return [violation for check in checks for violation in check]


def _claimed_once(rows: _Rows) -> Iterator[Violation]:
    uses: Counter[str] = Counter()
    for name, body in rows.committed():
        for ref in body["samples"]:
            uses[ref["sample_id"]] += body["kind"] == "fresh"
            sample = rows.samples.get(ref["sample_id"])
            if sample is None or (sample["state"], sample["manifest_id"]) != ("trained", name):
                yield Violation(1, ref["sample_id"], f"in committed {name} but not trained by it")
    for sample_id, count in uses.items():
        if count > 1:
            yield Violation(1, sample_id, f"committed {count} times")
    for sample_id, sample in rows.samples.items():
        state, manifest = sample["state"], rows.manifests.get(sample["manifest_id"] or "")
        if state == "trained" and uses[sample_id] != 1:
            yield Violation(1, sample_id, "trained, but in no committed manifest")
        if state == "claimed" and (manifest is None or manifest["state"] == "committed"):
            yield Violation(1, sample_id, f"claimed by {sample['manifest_id']}, which is over")
        if state == "dropped" and not sample["drop_reason"]:
            yield Violation(1, sample_id, "dropped without a counted reason")


def _array(data: bytes, dtype: str) -> np.ndarray:
    return np.frombuffer(data, dtype=dtype)


def _tokens_once(rows: _Rows) -> Iterator[Violation]:
    trained: Counter[str] = Counter()
    for sample in rows.samples.values():
        index = _array(sample["interaction"], "<i4")[_array(sample["mask"], "u1") == 1]
        for position, count in Counter(index.tolist()).items():
            trained[sample["interactions"][position]] += count
    for interaction_id, count in trained.items():
        support = rows.interactions[interaction_id]["support"]
        if count > support.count(0):
            yield Violation(
                1, interaction_id, f"{count} tokens in samples, {support.count(0)} may be trained"
            )


def full_prompt(interactions: dict[str, Row], interaction_id: str) -> np.ndarray:
    """The whole prompt of an interaction, its prefix taken from its chain of parents."""
    row = interactions[interaction_id]
    own = _array(row["prompt_ids"], "<i4")
    if row["prefix_parent"] is None:
        return own
    parent = row["prefix_parent"]
    output = _array(interactions[parent]["output_ids"], "<i4")
    return np.concatenate([full_prompt(interactions, parent), output, own])


def _evidence(rows: _Rows) -> Iterator[Violation]:
    for name, row in rows.interactions.items():
        if row["evidence_gaps"]:
            continue
        length = len(row["output_ids"]) // 4
        if not length == len(row["logprobs"]) // 4 == len(row["support"]):
            yield Violation(2, name, "ids, log-probs and support differ in length")
        covered = [i for r in row["versions"] for i in range(r["start"], r["end"])]
        if covered != list(range(length)):
            yield Violation(2, name, f"versions {row['versions']} do not cover {length} tokens")
        if row["prefix_parent"] and row["prefix_parent"] not in rows.interactions:
            yield Violation(2, name, f"prefix_parent {row['prefix_parent']} is missing")
            continue
        prompt = full_prompt(rows.interactions, name)
        digest = hashlib.sha256(prompt.astype("<i4").tobytes()).hexdigest()
        if (len(prompt), digest) != (row["prompt_length"], row["prompt_sha256"]):
            yield Violation(2, name, "the stored prompt is not the one that was sent")


def _samples_match(rows: _Rows) -> Iterator[Violation]:
    for name, sample in rows.samples.items():
        digest = hashlib.sha256()
        for column in ("tokens", "mask", "logprobs", "versions", "interaction"):
            digest.update(sample[column])
        if digest.hexdigest() != sample["digest"]:
            yield Violation(2, name, "digest does not match the arrays")
        leaf = rows.interactions[sample["interactions"][-1]]
        expected = np.concatenate(
            [full_prompt(rows.interactions, leaf["interaction_id"]),
             _array(leaf["output_ids"], "<i4")]
        )  # fmt: skip
        if not np.array_equal(_array(sample["tokens"], "<i4"), expected):
            yield Violation(2, name, "tokens are not the branch that was sampled")
        yield from _sampled_values(rows, name, sample)


def _sampled_values(rows: _Rows, name: str, sample: Row) -> Iterator[Violation]:
    mask = _array(sample["mask"], "u1") == 1
    index, logprobs = _array(sample["interaction"], "<i4"), _array(sample["logprobs"], "<f4")
    versions = _array(sample["versions"], "<i4")
    for position, interaction_id in enumerate(sample["interactions"]):
        chosen = mask & (index == position)
        if not chosen.any():
            continue
        row = rows.interactions[interaction_id]
        start, length = row["prompt_length"], len(row["output_ids"]) // 4
        if chosen[:start].any() or chosen[start + length :].any():
            yield Violation(2, name, f"trains tokens that {interaction_id} did not sample")
        here = slice(start, start + length)
        true_versions = np.repeat(
            [r["version"] for r in row["versions"]],
            [r["end"] - r["start"] for r in row["versions"]],
        )
        if not length == len(true_versions) == len(row["logprobs"]) // 4:
            yield Violation(2, name, f"the evidence of {interaction_id} differs in length")
            continue
        keep = chosen[here]
        if not np.array_equal(logprobs[here][keep], _array(row["logprobs"], "<f4")[keep]):
            yield Violation(2, name, f"log-probs differ from those of {interaction_id}")
        if not np.array_equal(versions[here][keep], true_versions[keep]):
            yield Violation(2, name, f"versions differ from those of {interaction_id}")


def _policy_chain(rows: _Rows) -> dict[tuple[str, str], dict[int, int | None]]:
    chains: dict[tuple[str, str], dict[int, int | None]] = defaultdict(dict)
    for row in rows.versions:
        chains[row["tenant_id"], row["policy_id"]][row["version"]] = row["parent"]
    return chains


def _staleness(rows: _Rows) -> Iterator[Violation]:
    chains = _policy_chain(rows)
    for name, body in rows.committed():
        parents = chains[body["tenant_id"], body["policy_id"]]
        age: dict[int, int] = {}
        step: int | None = body["base_version"]
        while step is not None:
            age[step] = len(age)
            step = parents.get(step)
        for ref in body["samples"]:
            sample = rows.samples[ref["sample_id"]]
            used = _array(sample["versions"], "<i4")[_array(sample["mask"], "u1") == 1]
            for version in set(used.tolist()):
                if body["kind"] == "fresh" and age.get(version, 1 << 30) > body["max_staleness"]:
                    yield Violation(
                        3, ref["sample_id"],
                        f"token of version {version} trained on base {body['base_version']} by "
                        f"{name}; max_staleness {body['max_staleness']}",
                    )  # fmt: skip


def _versions(rows: _Rows) -> Iterator[Violation]:
    made = Counter(row["manifest_id"] for row in rows.versions if row["manifest_id"])
    for name, _ in rows.committed():
        if made[name] != 1:
            yield Violation(5, name, f"committed, with {made[name]} versions")
    for name in made:
        if rows.manifests.get(name, {}).get("state") != "committed":
            yield Violation(5, name, "has a version but is not committed")
    by_policy: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows.versions:
        by_policy[row["tenant_id"], row["policy_id"]].append(row)
    for policy, versions in by_policy.items():
        where = "/".join(policy)
        numbers = {row["version"] for row in versions}
        if orphans := [v["version"] for v in versions if v["parent"] not in numbers | {None}]:
            yield Violation(5, where, f"versions {orphans} have no parent")
        live = [row["version"] for row in versions if row["state"] == "live"]
        if len(live) != 1:
            yield Violation(5, where, f"live versions: {live}")
        ordered = [r["version"] for r in sorted(versions, key=lambda r: r["created_at"])]
        if ordered != sorted(ordered):
            yield Violation(5, where, "version numbers do not increase with time")


def _manifests(rows: _Rows) -> Iterator[Violation]:
    for name, row in rows.manifests.items():
        if hashlib.sha256(row["body"].encode()).hexdigest() != row["digest"]:
            yield Violation(8, name, "the body is not what was digested")
        for ref in rows.bodies[name]["samples"]:
            sample = rows.samples.get(ref["sample_id"])
            if sample is None or sample["digest"] != ref["digest"]:
                yield Violation(8, name, f"sample {ref['sample_id']} is not the one claimed")
            for known in ref["returns"]:
                stored = rows.returns.get((known["interaction_id"], known["revision"]))
                if stored is None or stored["value"] != known["value"]:
                    yield Violation(8, name, f"return of {known['interaction_id']} changed")


def _signal(rows: _Rows) -> Iterator[Violation]:
    for name, body in rows.committed():
        if not any(ref["n_trainable"] for ref in body["samples"]):
            yield Violation(7, name, "committed a step without a trainable token")


def _tenants(rows: _Rows) -> Iterator[Violation]:
    for table in (rows.interactions, rows.rewards, rows.samples):
        for name, row in table.items():
            session = rows.sessions.get(row["session_id"])
            if session is None or session["tenant_id"] != row["tenant_id"]:
                yield Violation(9, name, f"belongs to session {row['session_id']} of another")


def _kept(rows: _Rows, acknowledged: Acknowledged) -> Iterator[Violation]:
    for interaction_id in acknowledged.interactions - set(rows.interactions):
        yield Violation(5, interaction_id, "an acknowledged answer is not stored")
    for reward_id, value in acknowledged.rewards.items():
        row = rows.rewards.get(reward_id)
        if row is None or row["value"] != value:
            yield Violation(5, reward_id, f"an acknowledged reward of {value} is not stored")


def check_checkpoints(url: str, kept: int = 2) -> list[Violation]:
    """The ``kept`` newest versions and the live one are whole on disk, with the hashes told."""
    found: list[Violation] = []
    with psycopg.connect(url, row_factory=dict_row) as connection:
        versions = connection.execute(
            "SELECT * FROM policy_version ORDER BY tenant_id, policy_id, version DESC"
        ).fetchall()
    seen: Counter[tuple[str, str]] = Counter()
    for row in versions:
        policy = (row["tenant_id"], row["policy_id"])
        seen[policy] += 1
        if seen[policy] > kept and row["state"] != "live":
            continue
        where = f"{policy[1]} v{row['version']}"
        weights = Path(row["checkpoint"]) / row["weights"] / "model.safetensors"
        if not (Path(row["checkpoint"]) / "checkpoint.json").is_file() or not weights.is_file():
            found.append(Violation(5, where, f"no whole checkpoint in {row['checkpoint']}"))
        elif hashlib.sha256(weights.read_bytes()).hexdigest() != row["model_sha256"]:
            found.append(Violation(8, where, f"{weights} is not what was committed"))
    return found


def check_lake(url: str, lake: str) -> list[Violation]:
    """Each compacted session lies in its file, with the ids that Postgres has for its calls.

    A file whose rows were committed a moment ago may still lie aside; that is not a violation.
    """
    with psycopg.connect(url, row_factory=dict_row) as connection:
        files: dict[str, set[str]] = defaultdict(set)
        for row in connection.execute("SELECT session_id, file FROM compacted_session"):
            files[row["file"]].add(row["session_id"])
        truth = {
            row["interaction_id"]: row
            for row in connection.execute(
                "SELECT interaction_id, session_id, output_ids FROM interaction"
            )
        }
    found: list[Violation] = []
    for file, sessions in files.items():
        place, aside = (f"{lake}/{part}interactions/{file}" for part in ("", "_aside/"))
        path = next((p for p in (place, aside) if Path(p).is_file()), None)
        if path is None:
            found.append(Violation(5, file, "named by rows, and not in the lake"))
            continue
        rows = pq.read_table(path, columns=["interaction_id", "session_id", "output_ids"])
        for row in rows.to_pylist():
            if truth.get(row["interaction_id"], {}).get("output_ids") != row["output_ids"]:
                found.append(Violation(2, row["interaction_id"], f"differs from {path}"))
        if missing := sessions - set(rows["session_id"].to_pylist()):
            found.append(Violation(5, file, f"lacks the sessions {sorted(missing)[:3]}"))
    return found


def check_invariants(
    data_dir: Path | str, acknowledged: Acknowledged | None = None
) -> list[Violation]:
    """All of it, for a running (or just ended, its Postgres up) installation in ``data_dir``."""
    from archon.stack import database_url

    url = database_url(Path(data_dir))
    lake = str(Path(data_dir).absolute() / "lake")
    return check_database(url, acknowledged) + check_checkpoints(url) + check_lake(url, lake)


if __name__ == "__main__":
    violations = check_invariants(sys.argv[1])
    for violation in violations:
        print(violation)
    print(f"{len(violations)} invariants broken" if violations else "every invariant holds")
    sys.exit(bool(violations))

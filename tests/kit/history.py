"""A small, healthy history written straight into the tables: one policy, two turns, one step.

Session ``ses_1``: ``int_1`` says [7] after [1, 2]; ``int_2`` goes on from it and says [8, 9].
One concatenated sample, trained by ``man_1`` on version 0 into version 1, which is live.
"""

import hashlib
from datetime import UTC, datetime
from typing import Any

import numpy as np

from archon import records as r
from archon.storage import Database, tables
from archon.storage.rows import insert_record

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def ints(*numbers: int) -> bytes:
    return np.array(numbers, "<i4").tobytes()


def floats(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def interaction(
    name: str, seq: int, own: tuple[int, ...], whole: tuple[int, ...], output: tuple[int, ...]
) -> r.Interaction:
    return r.Interaction(
        interaction_id=name, session_id="ses_1", tenant_id="t", policy_id="p", seq=seq,
        status=r.InteractionStatus.COMPLETE, protocol="openai.chat", request_digest=f"rq{seq}",
        messages_digest=f"ms{seq}", prompt_ids=ints(*own), prompt_length=len(whole),
        prompt_sha256=hashlib.sha256(ints(*whole)).hexdigest(), output_ids=ints(*output),
        logprobs=floats(*[-0.5 * seq] * len(output)), support=bytes(len(output)),
        versions=[{"version": 0, "start": 0, "end": len(output)}], sampling={"temperature": 1.0},
        finish_reason="length", started_at=NOW, ended_at=NOW,
        prefix_parent="int_1" if seq == 2 else None, previous="int_1" if seq == 2 else None,
    )  # fmt: skip


def sample() -> r.Sample:
    arrays: dict[str, Any] = {
        "tokens": ints(1, 2, 7, 3, 8, 9),
        "mask": bytes([0, 0, 1, 0, 1, 1]),
        "logprobs": floats(0, 0, -0.5, 0, -1, -1),
        "versions": ints(-1, -1, 0, -1, 0, 0),
        "interaction": ints(-1, -1, 0, -1, 1, 1),
    }
    digest = hashlib.sha256(b"".join(arrays.values())).hexdigest()
    return r.Sample(
        sample_id="smp_1", session_id="ses_1", group_id="grp_1", tenant_id="t", policy_id="p",
        state=r.SampleState.TRAINED, interactions=["int_1", "int_2"], n_tokens=6, n_trainable=3,
        min_version=0, max_version=0, digest=digest, created_at=NOW, manifest_id="man_1", **arrays,
    )  # fmt: skip


def version(number: int, state: r.VersionState, manifest_id: str | None) -> r.PolicyVersion:
    return r.PolicyVersion(
        tenant_id="t", policy_id="p", version=number, parent=number - 1 if number else None,
        state=state, checkpoint=f"c/{number}", weights="a/weights", model_sha256=f"{number}",
        created_at=NOW.replace(second=number), manifest_id=manifest_id,
    )  # fmt: skip


def manifest() -> r.BatchManifest:
    trained = sample()
    ref = r.SampleRef(
        trained.sample_id, trained.session_id, trained.group_id, trained.digest, 6, 3, 0, 0,
        (r.ReturnRef("int_1", 1.0, 0), r.ReturnRef("int_2", 1.0, 0)),
    )  # fmt: skip
    return r.BatchManifest(
        manifest_id="man_1", tenant_id="t", policy_id="p", kind="fresh", base_version=0,
        base_checkpoint="c/0", base_digest="0", parents=(0,), samples=(ref,), baseline=None,
        algorithm=r.AlgorithmSettings(), max_staleness=2, codec_digest="", engine_build="",
        seed=1, created_at=NOW.isoformat(),
    )  # fmt: skip


async def write_history(database: Database) -> None:
    """Insert the whole of it."""
    body = r.dumps(manifest())
    async with database.begin() as connection:
        for table, record in (
            (tables.tenant, r.Tenant("t", NOW)),
            (tables.policy, r.Policy("t", "p", {"model": "m"}, NOW)),
            (tables.group, r.Group("grp_1", "t", "p", "", 1, r.GroupState.DONE, NOW)),
            (tables.session,
             r.Session("ses_1", "t", "p", "grp_1", "slot", r.SessionState.SEALED, NOW)),
            (tables.interaction, interaction("int_1", 1, (1, 2), (1, 2), (7,))),
            (tables.interaction, interaction("int_2", 2, (3,), (1, 2, 7, 3), (8, 9))),
            (tables.sample, sample()),
            (tables.version, version(0, r.VersionState.RETIRED, None)),
            (tables.version, version(1, r.VersionState.LIVE, "man_1")),
        ):  # fmt: skip
            await connection.execute(insert_record(table, record))
        reward = r.Reward("rew_1", "ses_1", "t", "p", "", "", NOW, 1.0)
        await connection.execute(insert_record(tables.reward, reward, leave_out=frozenset({"seq"})))
        for name in ("int_1", "int_2"):
            row = r.Return(name, 0, "ses_1", "t", "p", 1.0, 1, NOW)
            await connection.execute(insert_record(tables.returns, row))
        await connection.execute(
            tables.manifest.insert().values(
                manifest_id="man_1",
                tenant_id="t",
                policy_id="p",
                base_version=0,
                state="committed",
                body=body,
                digest=hashlib.sha256(body.encode()).hexdigest(),
                created_at=NOW,
                ended_at=NOW,
            )  # fmt: skip
        )

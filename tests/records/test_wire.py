"""Records survive the wire, and a change of any of them changes the digest of what holds it."""

import json

import pytest

from archon.records import (
    AlgorithmSettings,
    BatchManifest,
    PolicySettings,
    ReturnRef,
    SampleRef,
    dumps,
    loads,
)


def manifest() -> BatchManifest:
    ref = SampleRef("smp_1", "ses_1", "grp_1", "ab", 12, 3, 4, 5, (ReturnRef("int_1", 0.92, 0),))
    return BatchManifest(
        manifest_id="man_1", tenant_id="t", policy_id="p", kind="fresh", base_version=5,
        base_checkpoint="c/5", base_digest="cd", parents=(5, 4), samples=(ref,), baseline=None,
        algorithm=AlgorithmSettings(), max_staleness=2, codec_digest="ef", engine_build="0.1",
        seed=7, created_at="2026-01-01T00:00:00+00:00",
    )  # fmt: skip


def test_a_nested_record_comes_back_equal_and_with_its_types() -> None:
    back = loads(BatchManifest, dumps(manifest()))
    assert back == manifest()
    assert isinstance(back.samples[0].returns[0], ReturnRef)
    assert isinstance(back.algorithm, AlgorithmSettings)


def test_the_text_is_canonical() -> None:
    text = dumps(manifest())
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))


def test_an_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="PolicySettings: unknown field batch_size"):
        loads(PolicySettings, {"model": "m", "batch_size": 3})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"close_on": "never"}, "close_on = 'never'"),
        ({"batch_groups": 0}, "batch_groups = 0"),
        ({"max_ahead": 3, "max_staleness": 2}, "max_ahead = 3"),
        ({"gamma": 1.5}, "gamma = 1.5"),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name = 'ppo'"),
        ({"algorithm": {"name": "rloo"}}, "normalize_std = false"),
        ({"algorithm": {"lr": -1.0}}, "algorithm.lr"),
        ({"algorithm": {"kl_coef": 0.1}}, "algorithm.kl_coef"),
        ({"samples": "all"}, "samples = 'all'"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        loads(PolicySettings, {"model": "m", **fields})

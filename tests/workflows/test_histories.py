"""Every workflow replays what earlier builds did, in the sandbox that a worker leaves out."""

import json
from pathlib import Path

import pytest
from temporalio.client import WorkflowHistory
from temporalio.worker import Replayer
from temporalio.workflow import NondeterminismError

from activities.worker import WORKFLOWS
from workflows.step import TrainingStepWorkflow

FOLDER = Path(__file__).parents[1] / "histories"
HISTORIES = sorted(FOLDER.glob("*.json"))


def read(path: Path) -> WorkflowHistory:
    return WorkflowHistory.from_json(path.stem, path.read_text())


def test_there_is_a_history_of_every_workflow() -> None:
    recorded = {path.stem.split("-")[0] for path in HISTORIES}
    assert recorded == {workflow.__name__ for workflow in WORKFLOWS}


@pytest.mark.parametrize("path", HISTORIES, ids=lambda path: path.stem)
async def test_a_history_replays(path: Path) -> None:
    await Replayer(workflows=WORKFLOWS).replay_workflow(read(path))


async def test_a_workflow_that_does_something_else_is_found_out() -> None:
    text = (FOLDER / "TrainingStepWorkflow-ordinary.json").read_text()
    altered = json.loads(text.replace("commit_step", "another_activity"))
    assert altered != json.loads(text)
    history = WorkflowHistory.from_json("altered", json.dumps(altered))
    with pytest.raises(NondeterminismError):
        await Replayer(workflows=[TrainingStepWorkflow]).replay_workflow(history)

"""``archon init``: a settings file to begin with."""

from pathlib import Path

from archon.stack.errors import StackError

SETTINGS_FILE = """\
# Settings of Archon. Each can also be an environment variable (ARCHON_GATEWAY__PORT=8080)
# or a flag (archon up --set gateway.port=8080). Remove a # to change a default.

# data_dir = ".archon"           # everything that must survive
# lake = "s3://bucket/archon"    # captured data; default: a folder in data_dir

[gateway]
# host = "127.0.0.1"             # a public address needs admin_key
# port = 8080
# admin_key = "sk-admin-…"

[postgres]
# url = "postgresql://user:password@host/archon"   # default: Archon runs its own

[temporal]
# address = "host:7233"          # default: Archon runs its own
# ui_port = 8233

[engine]
# replicas = 2                   # per policy
# urls = ["http://host:8000"]    # engines of your own instead

[policies.default]
model = "model"                  # folder in Hugging Face form, seen from this file
# max_model_len = 4096
# close_on = "reward"            # or "end", "idle": what ends an episode
# batch_groups = 8               # whole groups that make a step
# max_staleness = 2              # committed steps a trained token may lie behind

[policies.default.algorithm]
# name = "grpo"                  # or "rloo", with normalize_std = false
# lr = 1e-3
# epochs = 4
"""


def write_settings_file(file: Path, force: bool) -> None:
    if file.exists() and not force:
        raise StackError(f"{file} is there already; --force writes over it")
    try:
        file.write_text(SETTINGS_FILE)
    except OSError as error:
        raise StackError(f"cannot write {file}: {error.strerror}") from error

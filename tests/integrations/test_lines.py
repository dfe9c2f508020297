"""The lines of README's table that belong to a plugin: they name what is there."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = (
    (ROOT / "README.md")
    .read_text(encoding="utf-8")
    .partition("<!-- lines:begin -->")[2]
    .partition("<!-- lines:end -->")[0]
)


def test_axolotls_line_names_the_plugin():
    # tests/integrations/test_axolotl.py trains with it.
    assert "`plugins: [fa2patch.integrations.axolotl.Plugin]`" in TABLE
    spec = find_spec("fa2patch.integrations.axolotl")
    assert spec is not None and "\nclass Plugin(" in Path(str(spec.origin)).read_text(encoding="utf-8")


def test_ms_swifts_line_prints_the_plugins_path():
    # tests/integrations/test_ms_swift.py trains with it.
    assert '`--external_plugins "$(python -m fa2patch.integrations.ms_swift)"`' in TABLE
    command = [sys.executable, "-m", "fa2patch.integrations.ms_swift"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == ROOT / "fa2patch" / "integrations" / "ms_swift.py"


def test_llama_factorys_line_is_an_option_of_run_and_its_own_command():
    # tests/integrations/test_llama_factory.py trains with it.
    assert "`fa2patch run --max-tokens 8192 llamafactory-cli train config.yaml`" in TABLE


def test_the_other_lines_are_those_of_other_rooms_tests():
    for line in ("fa2patch.LightningCallback()", "fa2patch.packed_trainer(", "fa2patch.DataCollatorWithFlattening()"):
        assert line in TABLE

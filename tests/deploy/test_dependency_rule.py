"""The dependency rule of the design: buffer <- weight_sync <- producer, consumer <- deploy."""

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

MAY_IMPORT = {
    "buffer": {"buffer"},
    "weight_sync": {"buffer", "weight_sync"},
    "producer": {"buffer", "weight_sync", "producer"},
    "consumer": {"buffer", "weight_sync", "consumer"},
    "deploy": {"buffer", "weight_sync", "producer", "consumer", "deploy"},
}
HEAVY = {"torch", "vllm", "colossalai", "transformers"}


def imported_packages(file: Path) -> set[str]:
    """Top-level packages that a file imports anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_each_package_imports_only_what_stands_before_it() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {package}"
        for owner, allowed in MAY_IMPORT.items()
        for file in (ROOT / owner).rglob("*.py")
        for package in imported_packages(file) & set(MAY_IMPORT)
        if package not in allowed
    ]
    assert not wrong, "\n".join(wrong)


def test_buffer_and_deploy_import_neither_torch_nor_an_engine() -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {package}"
        for owner in ("buffer", "deploy")
        for file in (ROOT / owner).rglob("*.py")
        for package in imported_packages(file) & HEAVY
    ]
    assert not wrong, "\n".join(wrong)


def test_settings_and_run_spec_load_no_heavy_package() -> None:
    code = (
        "import sys, buffer.settings, weight_sync.settings, producer.settings, consumer.settings, deploy.spec;"
        f"print(sorted(set(sys.modules) & {HEAVY!r}))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"

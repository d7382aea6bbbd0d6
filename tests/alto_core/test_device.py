"""How much memory there is, as far as it is not the GPU's own word."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from alto_core import device


def test_a_containers_limit_bounds_the_hosts_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, total = tmp_path / "memory.max", psutil.virtual_memory().total
    monkeypatch.setattr(device, "CONTAINER_LIMITS", (str(limit), str(tmp_path / "nothing")))
    assert device.host_bytes() == total
    for written, expected in (("max\n", total), ("1073741824\n", 2**30), (f"{2 * total}\n", total)):
        limit.write_text(written, encoding="ascii")
        assert device.host_bytes() == expected

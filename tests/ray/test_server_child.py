"""The server behind an ingress, without Ray: it starts by its order, and ends with who ordered it."""

import os
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
from small_model import make_folder

from minisgl.ipc.child_process import module_command
from minisgl.ray.server_child import ServerOrder

LIMIT_S = 30.0


def test_the_server_starts_by_its_order_and_ends_with_its_parent(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "config.json").write_text("{}")  # only engines read it
    words = [f"--model={folder}", "--host=127.0.0.1", "--port=0", "--engine-listen=tcp://127.0.0.1:0"]
    order = ServerOrder([*words, "--api-key=shown-nowhere"], "a secret of the tests")
    # A node may have settings for engines in its environment, which the server would refuse.
    environ = {**os.environ, "MINISGL_DEVICE": "cpu", "MINISGL_SERVED_MODEL_NAME": "named"}
    # With a short path: a unix socket's has at most 107 bytes.
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))
    environ["TMPDIR"] = str(temporary)
    child = subprocess.Popen(
        module_command("minisgl.ray.server_child"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        line = next(line for line in child.stdout if line.startswith(b"Listening on "))
        assert line.endswith(b"loading named\n")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(line.split()[2].rstrip(b";").decode() + "/version", timeout=LIMIT_S)
        assert b"shown-nowhere" not in Path(f"/proc/{child.pid}/cmdline").read_bytes()
        child.stdin.close()
        assert child.wait(LIMIT_S) == 0
        assert not list(temporary.glob("minisgl-*"))
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()
        shutil.rmtree(temporary)

"""The file with the secret of a cluster: what is refused at the start, whatever links there are."""

from pathlib import Path

import pytest

from kvstore.cluster import read_secret
from kvstore.core.errors import ConfigError


def test_a_secret_is_read_without_the_line_end_behind_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"sixteen bytes or more\n")
    assert read_secret(str(tmp_path / "secret")) == b"sixteen bytes or more"
    assert read_secret("") == b""


@pytest.mark.parametrize("content", [b"", b"\n", b"hidden\n", None])
def test_one_that_proves_nothing_is_refused_and_not_shown(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read_secret(str(file))
    assert caught.value.fields["field"] == "peer_secret_file"
    assert "hidden" not in f"{caught.value.message} {caught.value.fields}"

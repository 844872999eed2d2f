"""A process that is to read a tokenizer, and does not."""

import pytest
from seer_worker.client.fleet import ProcessSettings
from seer_worker.client.tokenizer_reader import TokenizerReader

from seer_core.errors import ConfigError


def test_a_process_that_ends_before_it_has_read_says_how_it_ended(tmp_path):
    interpreter = tmp_path / "python"
    interpreter.write_text("#!/bin/sh\necho no such module\nexit 3\n")
    interpreter.chmod(0o700)
    settings = ProcessSettings(python=str(interpreter), log_dir=str(tmp_path / "logs"))
    reader = TokenizerReader(settings.launch("test", "", {}, {}, None), tmp_path)
    with pytest.raises(ConfigError, match=r"exited with status 3\nthe last lines of .*\nno such module"):
        reader()

"""Responses to images on which TRL could not train."""

from types import SimpleNamespace

import pytest
from seer_trl.images import require_no_places

from seer_core.errors import EngineError
from seer_core.model.arrays import Tokens

PLACE = 4


def test_what_trl_could_not_train_on_is_refused():
    written = SimpleNamespace(request_id="a/0", attachments={}, token_ids=Tokens([5, 6]))
    require_no_places([written], PLACE)
    written.token_ids.append(PLACE)
    with pytest.raises(EngineError, match="response a/0 has tokens of images itself"):
        require_no_places([written], PLACE)

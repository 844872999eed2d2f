"""Workers whose kernels keep KV in another order within blocks of one size share none."""

from types import SimpleNamespace

import pytest

from tests.support.installed import skip_without

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what vLLM imports


@pytest.fixture(scope="module")
def order_of():
    """Return a function: the name of an order, by how layers keep KV."""
    skip_without("vllm")
    from seer_vllm.parts import kv_order
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    class Kept(AttentionLayerBase):
        def __init__(self, backend, kv_cache, isa):
            self.backend, self.kv_cache, self.isa = backend, kv_cache, isa

        def get_attn_backend(self):
            return SimpleNamespace(get_name=lambda: self.backend)

        def get_kv_cache_spec(self, vllm_config):
            raise NotImplementedError

    def named(*layers, backend="CPU_ATTN", isa="vec"):
        made = [Kept(backend, each, isa) for each in layers]
        context = {str(number): each for number, each in enumerate([object(), *made])}
        return kv_order(SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context)))

    return named


def kv(blocks=8, *, heads_first=False):
    """Return KV, [blocks, keys and values, tokens, heads, width]."""
    if heads_first:
        return torch.zeros(blocks, 2, 4, 16, 32).transpose(2, 3)
    return torch.zeros(blocks, 2, 16, 4, 32)


def test_machines_with_other_instructions_have_other_orders(order_of):
    assert order_of(kv(), isa="amx") != order_of(kv(), isa="vec")


def test_so_have_other_backends_and_other_places_of_heads(order_of):
    found = {order_of(kv(), backend=name) for name in ("FLASH_ATTN", "FLASHINFER")}
    found |= {order_of(kv(heads_first=True), backend="FLASH_ATTN")}
    assert len(found) == 3


def test_neither_the_number_of_blocks_nor_of_layers_is_of_account(order_of):
    state = (torch.zeros(8, 3, 4), torch.zeros(8, 2, 5))
    assert order_of(kv(), state) == order_of(kv(80), kv(80), state)

"""Trees of drafts.

Node ``i`` of a request's tree is a draft token, node 0 the token that is settled already.  A child is reached
by ``next_token`` from its parent, its siblings by ``next_sibling`` from there; -1 ends either.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["reconstruct_indices_from_tree_mask"]


def reconstruct_indices_from_tree_mask(
    tree_mask: Tensor,
    verified_seq_len: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Make links and positions of trees that are given by who descends from whom.

    Args:
        tree_mask: bool [requests * nodes * nodes]: whether the column's node is the row's ancestor.
        verified_seq_len: settled tokens of each request before its node 0, [requests].
        positions: out, [requests * nodes].
        retrive_index: out, [requests, nodes]: the nodes' numbers over all requests.
        retrive_next_token: out, likewise: each node's first child.
        retrive_next_sibling: out, likewise: the next child of the same parent.
        batch_size: requests.
        draft_token_num: nodes.
    """
    nodes = draft_token_num
    ancestors = tree_mask.view(batch_size, nodes, nodes).bool().tril(-1)
    depths = ancestors.sum(-1)
    positions.copy_((depths + verified_seq_len.view(-1, 1)).flatten())
    retrive_index.copy_(torch.arange(batch_size * nodes).view(batch_size, nodes))
    order = torch.arange(nodes)
    parents = torch.where(ancestors, order, -1).amax(-1)  # the nearest ancestor comes last
    first_child = torch.where(ancestors, order[:, None], nodes).amin(-2)
    retrive_next_token.copy_(torch.where(first_child < nodes, first_child, -1))
    same_parent = (parents[:, :, None] == parents[:, None, :]) & (parents[:, None, :] >= 0)
    later = same_parent & (order[:, None] > order)
    sibling = torch.where(later, order[:, None], nodes).amin(-2)
    retrive_next_sibling.copy_(torch.where(sibling < nodes, sibling, -1))

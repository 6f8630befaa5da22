"""Stand-ins for the torch_npu operators that move tokens to experts, on several processes: their declarations, copied
from torch_npu 2.13.0 (torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml), and what they are documented to
compute. What they are documented to leave alone is not a number here."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

NAME = "experts"  # of the one communicator
GROUPS: dict[str, ProcessGroup] = {}
CALLS: list[tuple[str, int]] = []  # operator and global_bs

SCHEMAS = (
    "npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, str group_ep, int ep_world_size, int ep_rank_id, "
    "int moe_expert_num, *, Tensor? scales=None, Tensor? x_active_mask=None, Tensor? expert_scales=None, "
    "Tensor? elastic_info=None, Tensor? performance_info=None, str group_tp=\"\", int tp_world_size=0, "
    "int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, "
    "int quant_mode=0, int global_bs=0, int expert_token_nums_type=1, str comm_alg=\"\", int zero_expert_num=0, "
    "int copy_expert_num=0, int const_expert_num=0, int? y_dtype=None, int? x_dtype=None, int? scales_dtype=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    "npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
    "Tensor ep_send_counts, Tensor expert_scales, str group_ep, int ep_world_size, int ep_rank_id, "
    "int moe_expert_num, *, Tensor? tp_send_counts=None, Tensor? x_active_mask=None, Tensor? expand_scales=None, "
    "Tensor? shared_expert_x=None, Tensor? elastic_info=None, Tensor? ori_x=None, "
    "Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, Tensor? const_expert_v=None, "
    "Tensor? performance_info=None, str group_tp=\"\", int tp_world_size=0, int tp_rank_id=0, "
    "int expert_shard_type=0, int shared_expert_num=1, int shared_expert_rank_num=0, int global_bs=0, "
    "int comm_quant_mode=0, str comm_alg=\"\", int zero_expert_num=0, int copy_expert_num=0, "
    "int const_expert_num=0) -> Tensor",
)  # fmt: skip


def define(group: ProcessGroup) -> torch.library.Library:
    """Register the stand-ins; they last as long as the returned library. Like the operators, they have no gradient."""
    GROUPS[NAME] = group
    library = torch.library.Library("npu", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("npu_moe_distribute_dispatch_v2", _dispatch, "CPU")
    library.impl("npu_moe_distribute_combine_v2", _combine, "CPU")
    return library


def _dispatch(
    x, expert_ids, group_ep, ep_world_size, ep_rank_id, moe_expert_num, *,
    x_active_mask=None, shared_expert_num=1, global_bs=0, expert_token_nums_type=1, **unused,
):  # fmt: skip
    """Rows sorted by expert, then by where they come from. assist: rank, token and choice of each row."""
    group = _checked(group_ep, ep_world_size, ep_rank_id, x, expert_ids, x_active_mask, shared_expert_num, global_bs)
    CALLS.append(("dispatch", global_bs))
    assert expert_token_nums_type == 1
    assert all(value in (None, 0, "") for value in unused.values())
    assert x.shape[1] % 32 == 0
    local, choices = moe_expert_num // ep_world_size, expert_ids.shape[1]
    assert all(len(set(row)) == choices for row in expert_ids.tolist())
    assert int(expert_ids.min()) >= 0
    assert int(expert_ids.max()) < moe_expert_num
    every_x, every_ids, every_mask = (_gathered(value, group) for value in (x, expert_ids, x_active_mask))
    first, places = ep_rank_id * local, []
    for expert in range(first, first + local):
        places += ((every_ids == expert) & every_mask.unsqueeze(-1)).nonzero().tolist()
    room = global_bs * min(local, choices)
    expanded = x.new_full((room, x.shape[1]), float("nan"))
    assist = torch.full((room, 128), -1, dtype=torch.int32)
    counts = torch.zeros(local, dtype=torch.int64)
    received = torch.zeros(ep_world_size * local, dtype=torch.int32)
    for row, (rank, token, choice) in enumerate(places):
        expanded[row] = every_x[rank, token]
        assist[row, :3] = torch.tensor([rank, token, choice])
        counts[every_ids[rank, token, choice] - first] += 1
        received[(every_ids[rank, token, choice] - first) * ep_world_size + rank] += 1
    nothing = x.new_empty(0)
    return expanded, nothing, assist.flatten(), counts, received.cumsum(0).int(), nothing.int(), nothing.float()


def _combine(
    expand_x, expert_ids, assist_info_for_combine, ep_send_counts, expert_scales, group_ep, ep_world_size, ep_rank_id,
    moe_expert_num, *, x_active_mask=None, shared_expert_num=1, global_bs=0, **unused,
):  # fmt: skip
    group = _checked(
        group_ep, ep_world_size, ep_rank_id, expand_x, expert_ids, x_active_mask, shared_expert_num, global_bs
    )
    CALLS.append(("combine", global_bs))
    assert all(value in (None, 0, "") for value in unused.values())
    local = moe_expert_num // ep_world_size
    assert expand_x.shape[0] == global_bs * min(local, expert_ids.shape[1])
    assert ep_send_counts.shape == (ep_world_size * local,)
    assert expert_scales.dtype == torch.float32
    every, places = _gathered(expand_x, group), _gathered(assist_info_for_combine.view(-1, 128), group)
    out = expand_x.new_full((expert_ids.shape[0], expand_x.shape[1]), float("nan"))
    out[x_active_mask] = 0.0
    mine = (places[..., 0] == ep_rank_id).nonzero(as_tuple=True)
    _, token, choice = places[mine][:, :3].long().unbind(1)
    return out.index_add_(0, token, every[mine] * expert_scales[token, choice].unsqueeze(1).to(out.dtype))


def _checked(name, size, rank, x, ids, mask, shared, global_bs) -> ProcessGroup:
    group = GROUPS[name]
    assert (size, rank) == (group.size(), group.rank())
    assert (ids.dtype, mask.dtype, shared) == (torch.int32, torch.bool, 0)
    assert 0 < ids.shape[0] <= 512
    assert global_bs == ids.shape[0] * size
    assert not (mask[1:] & ~mask[:-1]).any()  # no hole
    return group


def _gathered(value: Tensor, group: ProcessGroup) -> Tensor:
    """[ranks, ...]"""
    out = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(out, value.contiguous(), group=group)
    return torch.stack(out)

"""A model that takes a checkpoint tensor by tensor, as far as weights go an engine's."""

from collections.abc import Iterable

import torch

State = dict[str, torch.Tensor]


class PlainModel(torch.nn.Module):
    def __init__(self, state: State) -> None:
        super().__init__()
        self.held = torch.nn.ParameterDict(
            {
                name.replace(".", "_"): torch.nn.Parameter(torch.zeros_like(t), False)
                for name, t in state.items()
            }
        )
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loads += 1
        for name, tensor in weights:
            self.held[name.replace(".", "_")].data.copy_(tensor)

    def holds(self, state: State) -> bool:
        return all(
            torch.equal(self.held[name.replace(".", "_")].view(torch.uint8), t.view(torch.uint8))
            for name, t in state.items()
        )

"""A torch module whose trainable parameters and gradients are windows on two flat vectors.

Loading a global model is then one copy, an optimizer step one operation, and an update one subtraction, whatever the
number of layers.
"""

import torch
from torch import Tensor, nn

from coterie.core.model_state import ModelState, split

_BATCH_NORM = nn.modules.batchnorm._BatchNorm  # pyright: ignore[reportPrivateUsage]


class FlatModel:
    """Takes over a module on a device.

    values: float32[D], parameters then floating buffers. params: values[:P]. grads: float32[P], filled by backward().
    The module's own tensors become windows on them (trainable parameters train in float32 whatever they were declared
    as).
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module = module.to(device)
        self.device = device
        self.layout, averaged, self.fixed = split(module)
        num_parameters = self.layout.num_parameters
        self.values = torch.empty(self.layout.size, device=device)
        self.params = self.values[:num_parameters]
        self.grads = torch.zeros(num_parameters, device=device)
        self._buffers: list[tuple[str, Tensor]] = []
        for (entry, view), tensor in zip(self.layout.views(self.values), averaged, strict=True):
            view.copy_(tensor.detach())
            tensor.data = view
            if not isinstance(tensor, nn.Parameter):
                self._buffers.append((entry.name, view))
        start = 0
        for entry, tensor in zip(self.layout.parameters, averaged, strict=False):
            tensor.grad = self.grads[start : start + entry.numel].view(entry.shape)
            start += entry.numel
        self.has_batch_norm = any(isinstance(part, _BATCH_NORM) for part in module.modules())
        self.convolves = any(isinstance(part, nn.Conv2d) for part in module.modules())

        # Every buffer as it is now, windows included, and every tensor that is not averaged with its value: what a
        # client's training leaves in them must not reach the next client.
        self._attached = [(part, dict(part._buffers)) for part in module.modules()]  # pyright: ignore[reportPrivateUsage]
        kept = [tensor for _, buffers in self._attached for tensor in buffers.values() if tensor is not None]
        windows = {id(tensor) for tensor in averaged}
        kept = [*(t for t in kept if id(t) not in windows), *(p for p in module.parameters() if not p.requires_grad)]
        self._kept = [(tensor, tensor.detach().clone(), tensor._version) for tensor in kept]

    def start_from(self, values: Tensor) -> None:
        """Take `values[D]` and forget all that earlier jobs left in the module."""
        for part, buffers in self._attached:
            part._buffers.update(buffers)  # pyright: ignore[reportPrivateUsage]
        with torch.no_grad():
            self.values.copy_(values)
            for i, (tensor, value, version) in enumerate(self._kept):
                if tensor._version != version:
                    tensor.copy_(value)
                    self._kept[i] = (tensor, value, tensor._version)

    def load(self, state: ModelState) -> None:
        """Take the values of a global model. Raises ModelError when its tensors are not those of this module."""
        state.check_fits(self.layout, self.fixed)
        with torch.no_grad():
            self.values.copy_(state.flat)
            for name, tensor in self.fixed.items():
                tensor.copy_(state.fixed[name])
        self._kept = [(tensor, tensor.detach().clone(), tensor._version) for tensor, _, _ in self._kept]

    def collect(self) -> Tensor:
        """The flat vector, after fetching buffers that a module replaced instead of writing into."""
        for name, view in self._buffers:
            current = self.module.get_buffer(name)
            if current.data_ptr() != view.data_ptr():
                view.copy_(current)
                current.data = view
        return self.values

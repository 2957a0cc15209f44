"""Per-record gradients of a model: losses, norms over all parameters, and weighted sums, for many rows at once.

The one interface of the client room to autograd. *exact* works for any model (``torch.func``); *fast* makes one
forward pass and one backward pass for activations only, and never keeps the per-record gradients of large layers.
"""

from sordino.client.gradients import loops
from sordino.client.gradients.alone import Alone, Singles
from sordino.client.gradients.choose import build
from sordino.client.gradients.types import Engine, Graded, LayerPlan, Slot

__all__ = ["Alone", "Engine", "Graded", "LayerPlan", "Singles", "Slot", "build", "loops"]

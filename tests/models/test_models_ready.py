"""What makes a model unfit for record-level privacy, and the repair."""

import pytest
import torch
from torch import nn

from sordino import models
from sordino.errors import BadInput


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
        self.norm = nn.InstanceNorm2d(48, affine=True, track_running_stats=True)
        self.out = nn.Linear(48, 4)

    def forward(self, x):
        return self.out(self.norm(self.body(x)).mean((2, 3)))


def test_batch_norm_is_refused_by_name_with_the_replacement_offered():
    with pytest.raises(BadInput, match=r"layer 'body.1' is BatchNorm2d.*sd\.models\.private_ready"):
        models.check(Nested(), (3, 8, 8), 4)


def test_running_statistics_of_instance_norm_are_refused():
    model = nn.Sequential(nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(), nn.Linear(15, 2))
    with pytest.raises(BadInput, match="running statistics"):
        models.check(model, (3, 5), 2)


def test_a_repaired_model_treats_every_record_on_its_own_and_keeps_its_weights():
    torch.manual_seed(0)
    model = Nested()
    with torch.no_grad():
        model.body[1].weight.uniform_(1, 2)
    ready = models.private_ready(model)
    models.check(ready, (3, 8, 8), 4)
    assert isinstance(ready.body[1], nn.GroupNorm)
    assert 48 // ready.body[1].num_groups >= 2
    assert torch.equal(ready.body[1].weight, model.body[1].weight)
    assert not [name for name, _ in ready.named_buffers()]
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(ready(x)[2], ready(x[2:3])[0])
    assert isinstance(model.body[1], nn.BatchNorm2d)


def test_one_channel_of_batch_norm_becomes_one_group():
    ready = models.private_ready(nn.Sequential(nn.Conv2d(1, 1, 3), nn.BatchNorm2d(1)))
    assert ready[1].num_groups == 1


def test_a_model_that_is_a_batch_norm_itself_is_replaced():
    assert isinstance(models.private_ready(nn.BatchNorm1d(6, affine=False)), nn.GroupNorm)


def test_tied_weights_may_be_trained():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    models.check(model, (3,), 3)


@pytest.mark.parametrize(
    ("model", "shape", "classes", "message"),
    [
        (nn.Linear(3, 4), (3,), 5, r"the labels have 5 classes.*gives \(2, 4\)"),
        (nn.Linear(3, 2), (3,), None, "one output per record"),
        (nn.Linear(3, 2), (4,), 2, r"cannot process records of shape \(4,\)"),
        (nn.Linear(3, 2).requires_grad_(False), (3,), 2, "no trainable parameter"),
    ],
)
def test_a_model_that_does_not_fit_the_records_is_refused(model, shape, classes, message):
    with pytest.raises(BadInput, match=message):
        models.check(model, shape, classes)


def test_regression_may_answer_with_or_without_an_axis():
    models.check(nn.Linear(3, 1), (3,), None)
    models.check(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)), (3,), None)


def test_token_models_are_checked_with_their_own_type():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(12, 2))
    models.check(model, (4,), 2, dtype=torch.long)


def test_the_check_leaves_the_model_in_its_mode():
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2))
    models.check(model, (3,), 2)
    assert model.training

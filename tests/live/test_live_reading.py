"""Reading parameters of a live model, however one gets hold of them."""

import torch
from live.both import loss_of, train


def test_norms_of_all_parameters(both):
    def pattern(model, optimizer, note):
        train(model, optimizer)
        note("norms", [parameter.norm() for parameter in model.parameters()])
        with torch.no_grad():
            note("sums", [parameter.abs().sum() for parameter in model.parameters()])

    both(pattern)


def test_a_weight_penalty_in_the_loss(both):
    def penalised(model, step):
        return loss_of(model, step) + 0.01 * sum(parameter.pow(2).sum() for parameter in model.parameters())

    def pattern(model, optimizer, note):
        note("losses", train(model, optimizer, 3, loss=penalised))

    both(pattern)

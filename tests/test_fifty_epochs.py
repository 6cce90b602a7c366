"""What README promises of `50 10`: the same figures, line by line, whatever trains."""
import pytest
from forked import train
from launch import figures


@pytest.mark.long
def test_fifty_epochs_print_the_same_losses_and_accuracies_with_one_process_and_two(tmp_path):
    one = figures(train("single_gpu.py", 50, 10, cwd=tmp_path, processes=0).stdout)
    two = figures(train("multigpu_torchrun.py", 50, 10, cwd=tmp_path).stdout)
    assert list(one) == list(two) == list(range(1, 51))
    assert one[1][1] < 20 and one[5][1] < 60 and one[50][1] > 95  # it learns, and not at once
    for epoch, (loss, accuracy) in one.items():
        assert two[epoch][0] == pytest.approx(loss, abs=1e-3)
        assert two[epoch][1] == pytest.approx(accuracy, abs=100 / 509 + 0.01)  # one sample, rounded

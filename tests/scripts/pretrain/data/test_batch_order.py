"""Which sequences an update reads, whatever the processes and the accumulation."""

from collections import Counter

import numpy as np

from dynattn.scripts.pretrain.data.batch_order import ProcessBatches, TrainingOrder


def test_each_epoch_is_a_permutation_and_steps_run_on_across_it():
    order = TrainingOrder(sequences=10, global_batch=4, seed=3)
    seen = np.concatenate([order[step] for step in range(10)])
    epochs = seen.reshape(4, 10)
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])
    assert np.array_equal(order[2], TrainingOrder(10, 4, seed=3)[2])


def test_processes_and_accumulation_share_out_the_same_sequences():
    order = TrainingOrder(sequences=50, global_batch=8, seed=0)
    expected = [Counter(order[step].tolist()) for step in range(3)]
    for batch_size, processes in [(8, 1), (4, 1), (2, 2), (1, 4)]:
        passes = 8 // batch_size // processes
        shared: list[Counter[int]] = [Counter() for _ in range(3)]
        places: list[int] = []
        for process in range(processes):
            batches = list(ProcessBatches(order, range(3), batch_size, process, processes))
            for index, batch in enumerate(batches):
                shared[index // passes].update(sequence for sequence, _ in batch)
                places += [place for _, place in batch]
        assert shared == expected
        assert sorted(places) == list(range(24))

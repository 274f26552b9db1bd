"""What quality.py makes of logits."""

import unittest

import numpy
import quality


class Figures(unittest.TestCase):
    def test_log_probabilities_are_scaled_numbers(self):
        rows = numpy.zeros((2, 4 + 3), numpy.uint16)
        rows[:, :4] = numpy.array([[0.5, -10], [1, -3]], numpy.float32).view(numpy.uint16)
        rows[:, 4:] = [[0, 2, 20], [3, 0, 1]]
        self.assertEqual(quality.log_probabilities(rows).tolist(), [[-10, -9, 0], [0, -3, -2]])

    def test_divergence(self):
        p, q = numpy.log([[0.5, 0.5]]), numpy.log([[0.25, 0.75]])
        self.assertAlmostEqual(quality.divergence(p, q)[0], 0.5 * numpy.log(2) + 0.5 * numpy.log(2 / 3))
        self.assertEqual(quality.divergence(p, p)[0], 0)

    def test_an_interval_is_that_of_the_mean_over_texts(self):
        rng = numpy.random.default_rng(1)
        texts = [rng.normal(mean, 1, (100, 50)) for mean in (1.0, 3.0)]
        low, up = quality.interval(texts)
        self.assertTrue(1.9 < low < 2 < up < 2.1, (low, up))
        # contexts that are all alike leave no doubt, however the tokens in them differ
        alike = [numpy.tile([0.0, 1.0], (10, 1))]
        self.assertEqual(quality.interval(alike).tolist(), [0.5, 0.5])


if __name__ == "__main__":
    unittest.main()

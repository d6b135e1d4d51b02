//! One training step of a perceptron with a hidden layer. Propagates values forwards and errors backwards, and adjusts
//! the weights.

use crate::{Bound, Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Number of hidden units. The network has one output.
const HIDDEN: usize = 16;
/// Number of inputs summed per block.
const BLOCK_INPUTS: u32 = 16;
/// Fraction of the error that is added to the weights. The kernels use the same value.
const LEARNING_RATE: f32 = 0.3;
/// Fraction of the last change that is added to the weights. The kernels use the same value.
const MOMENTUM: f32 = 0.3;
/// The target output.
const TARGET: f32 = 0.1;

/// A network and an input. The arrays of inputs and hidden units start with a constant 1, and the weights of this
/// constant are the biases.
#[derive(Debug)]
pub(crate) struct Backprop {
    inputs: Vec<f32>,
    /// Weights, with a row per input and a column per hidden unit.
    weights: Vec<f32>,
    changes: Vec<f32>,
    output_weights: Vec<f32>,
    output_changes: Vec<f32>,
}

/// Result of a training step.
struct Trained {
    values: Vec<f64>,
    output: f64,
    weights: Vec<f64>,
    changes: Vec<f64>,
    output_weights: Vec<f64>,
    output_changes: Vec<f64>,
}

impl Backprop {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        let (count, mut random) = (1024 * scale as usize, Random::new(seed));
        let inputs = [vec![1.0], random.units(count)].concat();
        // Each unit's weights have the same sign, and their sum stays small for any count, so hidden units do not
        // saturate, and sums do not lose precision.
        let gains: Vec<f32> = random.units(HIDDEN).iter().map(|unit| (8.0 * unit - 4.0) / count as f32).collect();
        let mut random_weights = || {
            let units = random.units(inputs.len() * HIDDEN);
            units.iter().zip(gains.iter().cycle()).map(|(unit, gain)| unit * gain).collect()
        };
        let (weights, changes) = (random_weights(), random_weights());
        let mut output = || random.units(HIDDEN + 1).iter().map(|unit| unit - 0.5).collect();
        let (output_weights, output_changes) = (output(), output());
        Self { inputs, weights, changes, output_weights, output_changes }
    }

    /// Returns the number of inputs, excluding the constant.
    fn count(&self) -> usize {
        self.inputs.len() - 1
    }

    fn trained(&self) -> Trained {
        let sigmoid = |sum: f64| 1.0 / (1.0 + (-sum).exp());
        let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect::<Vec<f64>>();
        let inputs = wide(&self.inputs);
        let (mut weights, mut changes) = (wide(&self.weights), wide(&self.changes));
        let (mut output_weights, mut output_changes) = (wide(&self.output_weights), wide(&self.output_changes));

        let mut sums = [0.0; HIDDEN];
        for (input, row) in inputs.iter().zip(weights.chunks(HIDDEN)) {
            sums.iter_mut().zip(row).for_each(|(sum, weight)| *sum += input * weight);
        }
        let values = [vec![1.0], sums.map(sigmoid).to_vec()].concat();
        let output = sigmoid(values.iter().zip(&output_weights).map(|(value, weight)| value * weight).sum());
        let error = output * (1.0 - output) * (f64::from(TARGET) - output);
        let hidden_error = |(value, weight): (&f64, &f64)| value * (1.0 - value) * error * weight;
        let errors: Vec<f64> = values.iter().zip(&output_weights).skip(1).map(hidden_error).collect();

        let adjust = |weight: &mut f64, change: &mut f64, error: f64, value: f64| {
            *change = f64::from(LEARNING_RATE) * error * value + f64::from(MOMENTUM) * *change;
            *weight += *change;
        };
        for ((weight, change), value) in output_weights.iter_mut().zip(&mut output_changes).zip(&values) {
            adjust(weight, change, error, *value);
        }
        let rows = weights.chunks_mut(HIDDEN).zip(changes.chunks_mut(HIDDEN));
        for ((weights, changes), input) in rows.zip(&inputs) {
            for ((weight, change), error) in weights.iter_mut().zip(changes).zip(&errors) {
                adjust(weight, change, *error, *input);
            }
        }
        Trained { values, output, weights, changes, output_weights, output_changes }
    }
}

impl Workload for Backprop {
    fn name(&self) -> &'static str {
        "backprop"
    }

    fn size(&self) -> String {
        format!("{} inputs, {HIDDEN} hidden", self.count())
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/backprop.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let floats = |count: usize| (count * size_of::<f32>()) as u64;
        let mut values = [0.0; HIDDEN + 1];
        values[0] = 1.0;
        vec![
            Slot::floats("inputs", &self.inputs),
            Slot::floats("weights", &self.weights).output(),
            Slot::floats("changes", &self.changes).output(),
            Slot::scratch("sums", floats(self.count() / BLOCK_INPUTS as usize * HIDDEN)),
            Slot::floats("values", &values).output(),
            Slot::floats("output weights", &self.output_weights).output(),
            Slot::floats("output changes", &self.output_changes).output(),
            Slot::scratch("errors", floats(HIDDEN + 1)),
            Slot::scratch("output", floats(1)).output(),
        ]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [inputs, weights, changes, sums, values, output_weights, output_changes, errors, output] =
            setup.buffers()?;
        let blocks = self.count() as u32 / BLOCK_INPUTS;
        let layer = Grid::plane([blocks, 1], [HIDDEN as u32, BLOCK_INPUTS]);

        let params = Params::new().buffer(inputs).buffer(weights).buffer(sums);
        setup.launch(gpu, "forward", layer, &params, &[inputs, weights, sums])?;

        let params = Params::new().word(blocks).buffer(sums).buffer(weights).buffer(values);
        setup.launch(gpu, "hidden", Grid::line(HIDDEN as u32 * 256, 256), &params, &[sums, weights, values])?;

        let params = Params::new().buffer(values).buffer(output_weights).buffer(output_changes);
        let params = params.buffer(errors).buffer(output).float(TARGET).word(0);
        let uses = [values, output_weights, output_changes, errors, output];
        setup.launch(gpu, "output", Grid::line(32, 32), &params, &uses)?;

        let params = Params::new().buffer(inputs).buffer(errors).buffer(weights).buffer(changes);
        setup.launch(gpu, "adjust", layer, &params, &[inputs, errors, weights, changes])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let Trained { values, output, weights, changes, output_weights, output_changes } = self.trained();
        let narrow = |values: &[f64]| values.iter().map(|value| *value as f32).collect::<Vec<f32>>();
        // Units are 2^-24. A hidden unit's sum and the sum of its terms' magnitudes are below 4. A term passes through
        // one product, eight sums in the trees, two more sums, and its thread's sums, one for every 4096 inputs. The
        // sigmoid reduces this error to a quarter. The errors of e^x, 1 / x and their sum are below 12.
        let unit = 1.0 / (1 << 24) as f32;
        let sums = 4.0 * (15.0 + self.count() as f32 / 4096.0);
        let hidden = (sums / 4.0 + 12.0) * unit;
        let value_bound = Bound { relative: 0.0, absolute: hidden };
        let mut verified = results.same_floats("values", &narrow(&values), value_bound)?;
        // The output weights are below 0.5, so the error of the weighted sum is 17 / 2 times the hidden units' error,
        // plus 17 * 7 units.
        let wrong = 0.25 * (17.0 / 2.0 * hidden + 17.0 * 7.0 * unit) + 12.0 * unit;
        let output_bound = Bound { relative: 0.0, absolute: wrong };
        verified += results.same_floats("output", &narrow(&[output]), output_bound)?;
        // The error of s * (1 - s) * (t - s) is less than the error of s. The error of an output weight is 0.3 times
        // the sum of this error and of its unit's error. The factor s * (1 - s) * w from the output to a hidden unit is
        // below an eighth. The errors of the hidden units' values are reduced by the same factor.
        let bound = Bound { relative: 8.0 * unit, absolute: LEARNING_RATE * (wrong + hidden) };
        verified += results.same_floats("output weights", &narrow(&output_weights), bound)?;
        verified += results.same_floats("output changes", &narrow(&output_changes), bound)?;
        let bound = Bound { absolute: bound.absolute / 8.0, ..bound };
        verified += results.same_floats("weights", &narrow(&weights), bound)?;
        verified += results.same_floats("changes", &narrow(&changes), bound)?;
        Ok(verified)
    }
}

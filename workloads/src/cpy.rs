//! Copy workloads, which copy data through VRAM with the copy engine, and between buffers shared by the CPU and the
//! GPU.

use crate::{Gpu, Grid, Params, Random, Results, Setup, Slot, Workload};
use anyhow::Result;

/// Size in bytes at scale 1. The papers' 64 MiB are 256 times as large.
const BYTES: u64 = 256 << 10;

fn input(scale: u32, seed: u64) -> Vec<u32> {
    Random::new(seed).words((BYTES / 4 * u64::from(scale)) as usize)
}

fn size(input: &[u32]) -> String {
    format!("{}KiB", size_of_val(input) >> 10)
}

/// Copies from host to device, device to device, and device to host.
#[derive(Debug)]
pub(crate) struct Cpy {
    input: Vec<u32>,
}

impl Cpy {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        Self { input: input(scale, seed) }
    }
}

impl Workload for Cpy {
    fn name(&self) -> &'static str {
        "cpy"
    }

    fn size(&self) -> String {
        size(&self.input)
    }

    fn source(&self) -> &'static str {
        ""
    }

    fn buffers(&self) -> Vec<Slot> {
        let target = Slot::scratch("target", size_of_val(&*self.input) as u64);
        vec![Slot::words("source", &self.input), target.output()]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [source, target] = setup.buffers()?;
        gpu.copy(source, target, source.bytes)
    }

    fn check(&self, results: &Results) -> Result<u64> {
        results.same_words("target", &self.input)
    }
}

/// Copies with pinned host memory, which the copy engine and a kernel access directly.
#[derive(Debug)]
pub(crate) struct PinCpy {
    input: Vec<u32>,
}

impl PinCpy {
    pub(crate) fn new(scale: u32, seed: u64) -> Self {
        Self { input: input(scale, seed) }
    }
}

impl Workload for PinCpy {
    fn name(&self) -> &'static str {
        "pincpy"
    }

    fn size(&self) -> String {
        size(&self.input)
    }

    fn source(&self) -> &'static str {
        include_str!("kernels/pincpy.sm20")
    }

    fn buffers(&self) -> Vec<Slot> {
        let bytes = size_of_val(&*self.input) as u64;
        vec![
            Slot::words("source", &self.input).in_ram(),
            Slot::scratch("device", bytes),
            Slot::scratch("target", bytes).in_ram().output(),
            Slot::scratch("inverse", bytes).in_ram().output(),
        ]
    }

    fn launch(&self, gpu: &mut dyn Gpu, setup: &Setup) -> Result<()> {
        let [source, device, target, inverse] = setup.buffers()?;
        gpu.copy(source, device, source.bytes)?;
        gpu.copy(device, target, source.bytes)?;
        let count = u32::try_from(self.input.len())?;
        let params = Params::new().word(count).buffer(source).buffer(inverse);
        setup.launch(gpu, "invert", Grid::line(count.div_ceil(4), 256), &params, &[source, inverse])
    }

    fn check(&self, results: &Results) -> Result<u64> {
        let inverse: Vec<u32> = self.input.iter().map(|word| !word).collect();
        Ok(results.same_words("target", &self.input)? + results.same_words("inverse", &inverse)?)
    }
}

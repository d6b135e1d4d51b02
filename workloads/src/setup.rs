//! A workload on a device: its program, its buffers, what came back.

use crate::{Bound, Buffer, Gpu, Grid, Module, Params, Place, Workload, compare_floats, compare_words};
use anyhow::{Context, Result};

/// A buffer that a workload wants.
#[derive(Clone, Debug)]
pub struct Slot {
    name: &'static str,
    place: Place,
    bytes: u64,
    input: Option<Vec<u8>>,
    output: bool,
}

impl Slot {
    /// In VRAM, for the device alone: neither filled nor read back.
    #[must_use]
    pub fn scratch(name: &'static str, bytes: u64) -> Self {
        Self { name, place: Place::Vram, bytes, input: None, output: false }
    }

    /// Filled with bytes before the launch.
    #[must_use]
    pub fn bytes(name: &'static str, input: Vec<u8>) -> Self {
        Self { name, place: Place::Vram, bytes: input.len() as u64, input: Some(input), output: false }
    }

    /// Filled with words before the launch.
    #[must_use]
    pub fn words(name: &'static str, input: &[u32]) -> Self {
        Self::bytes(name, crate::words_to_bytes(input))
    }

    /// Filled with floats before the launch.
    #[must_use]
    pub fn floats(name: &'static str, input: &[f32]) -> Self {
        Self::bytes(name, crate::floats_to_bytes(input))
    }

    /// Read back after the launch, too.
    #[must_use]
    pub fn output(self) -> Self {
        Self { output: true, ..self }
    }

    /// In the machine's RAM instead of VRAM.
    #[must_use]
    pub fn in_ram(self) -> Self {
        Self { place: Place::Ram, ..self }
    }
}

/// What came back: the bytes of all outputs, by name.
#[derive(Clone, Debug, Default)]
pub struct Results(Vec<(&'static str, Vec<u8>)>);

impl Results {
    /// The bytes of an output.
    ///
    /// # Errors
    /// None of that name came back.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let found = self.0.iter().find(|(of, _)| *of == name);
        found.map(|(_, bytes)| &bytes[..]).with_context(|| format!("{name} was not read back"))
    }

    /// The words of an output.
    ///
    /// # Errors
    /// As of [`Self::bytes`].
    pub fn words(&self, name: &str) -> Result<Vec<u32>> {
        Ok(crate::bytes_to_words(self.bytes(name)?))
    }

    /// The floats of an output.
    ///
    /// # Errors
    /// As of [`Self::bytes`].
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        Ok(crate::bytes_to_floats(self.bytes(name)?))
    }

    /// Compares an output's words bit for bit; returns the number of bytes.
    ///
    /// # Errors
    /// Where they differ, or no such output.
    pub fn same_words(&self, name: &str, expected: &[u32]) -> Result<u64> {
        compare_words(name, &self.words(name)?, expected)
    }

    /// Compares an output's floats within a bound; returns the number of bytes.
    ///
    /// # Errors
    /// Where they differ, or no such output.
    pub fn same_floats(&self, name: &str, expected: &[f32], bound: Bound) -> Result<u64> {
        compare_floats(name, &self.floats(name)?, expected, bound)
    }
}

/// A workload's program and buffers on a device.
#[derive(Debug)]
pub struct Setup {
    module: Module,
    slots: Vec<Slot>,
    buffers: Vec<Buffer>,
    results: Results,
}

impl Setup {
    /// Makes program and buffers; nothing is transferred.
    ///
    /// # Errors
    /// A kernel that does not assemble, or what the device says.
    pub fn new(workload: &dyn Workload, gpu: &mut dyn Gpu) -> Result<Self> {
        let module = gpu.load(&crate::assemble(workload.source())?)?;
        let slots = workload.buffers();
        let buffers = slots.iter().map(|slot| gpu.allocate(slot.place, slot.bytes)).collect::<Result<_>>()?;
        Ok(Self { module, slots, buffers, results: Results::default() })
    }

    /// All buffers, in the order of [`Workload::buffers`].
    ///
    /// # Errors
    /// There are not `N`.
    pub fn buffers<const N: usize>(&self) -> Result<[Buffer; N]> {
        let found = self.all_buffers();
        found.try_into().with_context(|| format!("{} buffers instead of {N}", found.len()))
    }

    /// The same, however many there are.
    #[must_use]
    pub fn all_buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Launches a kernel of the workload; see [`Gpu::launch`].
    ///
    /// # Errors
    /// What the device says.
    pub fn launch(&self, gpu: &mut dyn Gpu, kernel: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()> {
        gpu.launch(self.module, kernel, grid, params, uses)
    }

    /// Transfers all inputs to the device.
    ///
    /// # Errors
    /// What the device says.
    pub fn upload(&self, gpu: &mut dyn Gpu) -> Result<()> {
        for (slot, buffer) in self.slots.iter().zip(&self.buffers) {
            if let Some(input) = &slot.input {
                gpu.upload(*buffer, 0, input)?;
            }
        }
        Ok(())
    }

    /// Transfers all outputs from the device.
    ///
    /// # Errors
    /// What the device says.
    pub fn download(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        self.results.0.clear();
        for (slot, buffer) in self.slots.iter().zip(&self.buffers).filter(|(slot, _)| slot.output) {
            let mut bytes = vec![0; usize::try_from(slot.bytes)?];
            gpu.download(*buffer, 0, &mut bytes)?;
            self.results.0.push((slot.name, bytes));
        }
        Ok(())
    }

    /// What [`Self::download`] brought.
    #[must_use]
    pub fn results(&self) -> &Results {
        &self.results
    }

    /// Gives the buffers back; the program stays with the device.
    ///
    /// # Errors
    /// What the device says.
    pub fn free(self, gpu: &mut dyn Gpu) -> Result<()> {
        self.buffers.into_iter().try_for_each(|buffer| gpu.free(buffer))
    }
}

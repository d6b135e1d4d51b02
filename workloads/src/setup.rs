//! A workload on a device: its program, buffers and results.

use crate::{Bound, Buffer, Gpu, Grid, Module, Params, Place, Random, Workload, compare_floats, compare_words};
use anyhow::{Context, Result};
use std::borrow::Cow;

/// A buffer of a workload.
#[derive(Clone, Debug)]
pub struct Slot {
    name: Cow<'static, str>,
    place: Place,
    bytes: u64,
    input: Input,
    output: bool,
}

/// Initial contents of a buffer.
#[derive(Clone, Debug)]
enum Input {
    Nothing,
    Bytes(Vec<u8>),
    /// Consecutive words of [`Random::word`], generated when needed.
    Random(Random),
}

impl Slot {
    /// Creates a VRAM buffer for the device only, which is neither filled nor read back.
    #[must_use]
    pub fn scratch(name: impl Into<Cow<'static, str>>, bytes: u64) -> Self {
        Self { name: name.into(), place: Place::Vram, bytes, input: Input::Nothing, output: false }
    }

    /// Creates a buffer that is filled with bytes before the launch.
    #[must_use]
    pub fn bytes(name: impl Into<Cow<'static, str>>, input: Vec<u8>) -> Self {
        let bytes = input.len() as u64;
        Self { input: Input::Bytes(input), ..Self::scratch(name, bytes) }
    }

    /// Creates a buffer that is filled with random words, which are generated during the upload.
    #[must_use]
    pub fn random(name: impl Into<Cow<'static, str>>, bytes: u64, random: Random) -> Self {
        Self { input: Input::Random(random), ..Self::scratch(name, bytes) }
    }

    /// Creates a buffer that is filled with words before the launch.
    #[must_use]
    pub fn words(name: impl Into<Cow<'static, str>>, input: &[u32]) -> Self {
        Self::bytes(name, crate::words_to_bytes(input))
    }

    /// Creates a buffer that is filled with floats before the launch.
    #[must_use]
    pub fn floats(name: impl Into<Cow<'static, str>>, input: &[f32]) -> Self {
        Self::bytes(name, crate::floats_to_bytes(input))
    }

    /// Marks the buffer as an output, which is read back after the launch.
    #[must_use]
    pub fn output(self) -> Self {
        Self { output: true, ..self }
    }

    /// Places the buffer in system RAM instead of VRAM.
    #[must_use]
    pub fn in_ram(self) -> Self {
        Self { place: Place::Ram, ..self }
    }
}

/// The bytes of all outputs, by name.
#[derive(Clone, Debug, Default)]
pub struct Results(Vec<(Cow<'static, str>, Vec<u8>)>);

impl Results {
    /// Returns an output as bytes.
    ///
    /// # Errors
    /// Returns an error if no output has this name.
    pub fn bytes(&self, name: &str) -> Result<&[u8]> {
        let found = self.0.iter().find(|(of, _)| *of == name);
        found.map(|(_, bytes)| &bytes[..]).with_context(|| format!("{name} was not read back"))
    }

    /// Returns an output as words.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::bytes`].
    pub fn words(&self, name: &str) -> Result<Vec<u32>> {
        Ok(crate::bytes_to_words(self.bytes(name)?))
    }

    /// Returns an output as floats.
    ///
    /// # Errors
    /// Returns the same errors as [`Self::bytes`].
    pub fn floats(&self, name: &str) -> Result<Vec<f32>> {
        Ok(crate::bytes_to_floats(self.bytes(name)?))
    }

    /// Compares an output's words bit for bit. Returns the number of bytes compared.
    ///
    /// # Errors
    /// Returns an error if the results differ, or if no such output exists.
    pub fn same_words(&self, name: &str, expected: &[u32]) -> Result<u64> {
        compare_words(name, &self.words(name)?, expected)
    }

    /// Compares an output's floats within a bound. Returns the number of bytes compared.
    ///
    /// # Errors
    /// Returns an error if the results differ, or if no such output exists.
    pub fn same_floats(&self, name: &str, expected: &[f32], bound: Bound) -> Result<u64> {
        compare_floats(name, &self.floats(name)?, expected, bound)
    }
}

/// A workload's program and buffers on a device.
#[derive(Debug)]
pub struct Setup {
    /// The program, or `None` if the workload has no kernels.
    module: Option<Module>,
    slots: Vec<Slot>,
    buffers: Vec<Buffer>,
    results: Results,
}

impl Setup {
    /// Loads the program and allocates the buffers, without uploading the inputs.
    ///
    /// # Errors
    /// Returns an error if a kernel does not assemble, or if the device reports an error.
    pub fn new(workload: &dyn Workload, gpu: &mut dyn Gpu) -> Result<Self> {
        let program = crate::assemble(workload.source())?;
        let module = if program.kernels.is_empty() { None } else { Some(gpu.load(&program)?) };
        let slots = workload.buffers();
        let buffers = slots.iter().map(|slot| gpu.allocate(slot.place, slot.bytes)).collect::<Result<_>>()?;
        Ok(Self { module, slots, buffers, results: Results::default() })
    }

    /// Returns all buffers, in the order of [`Workload::buffers`].
    ///
    /// # Errors
    /// Returns an error if the number of buffers is not `N`.
    pub fn buffers<const N: usize>(&self) -> Result<[Buffer; N]> {
        let found = self.all_buffers();
        found.try_into().with_context(|| format!("{} buffers instead of {N}", found.len()))
    }

    /// Returns all buffers.
    #[must_use]
    pub fn all_buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Launches a kernel of the workload. See [`Gpu::launch`].
    ///
    /// # Errors
    /// Returns an error if the device reports an error.
    pub fn launch(&self, gpu: &mut dyn Gpu, kernel: &str, grid: Grid, params: &Params, uses: &[Buffer]) -> Result<()> {
        gpu.launch(self.module.context("the workload has no kernels")?, kernel, grid, params, uses)
    }

    /// Transfers all inputs to the device.
    ///
    /// # Errors
    /// Returns an error if the device reports an error.
    pub fn upload(&self, gpu: &mut dyn Gpu) -> Result<()> {
        for (slot, buffer) in self.slots.iter().zip(&self.buffers) {
            match &slot.input {
                Input::Nothing => {}
                Input::Bytes(input) => gpu.upload(*buffer, 0, input)?,
                Input::Random(random) => upload_random(gpu, *buffer, *random)?,
            }
        }
        Ok(())
    }

    /// Transfers all outputs from the device.
    ///
    /// # Errors
    /// Returns an error if the device reports an error.
    pub fn download(&mut self, gpu: &mut dyn Gpu) -> Result<()> {
        self.results.0.clear();
        for (slot, buffer) in self.slots.iter().zip(&self.buffers).filter(|(slot, _)| slot.output) {
            let mut bytes = vec![0; usize::try_from(slot.bytes)?];
            gpu.download(*buffer, 0, &mut bytes)?;
            self.results.0.push((slot.name.clone(), bytes));
        }
        Ok(())
    }

    /// Returns the results of [`Self::download`].
    #[must_use]
    pub fn results(&self) -> &Results {
        &self.results
    }

    /// Frees the buffers. The program remains on the device.
    ///
    /// # Errors
    /// Returns an error if the device reports an error.
    pub fn free(self, gpu: &mut dyn Gpu) -> Result<()> {
        self.buffers.into_iter().try_for_each(|buffer| gpu.free(buffer))
    }
}

/// Uploads random words in chunks.
fn upload_random(gpu: &mut dyn Gpu, buffer: Buffer, mut random: Random) -> Result<()> {
    const BYTES_PER_UPLOAD: u64 = 1 << 20;
    let mut at = 0;
    while at < buffer.bytes {
        let bytes = (buffer.bytes - at).min(BYTES_PER_UPLOAD);
        gpu.upload(buffer, at, &crate::words_to_bytes(&random.words(usize::try_from(bytes / 4)?)))?;
        at += bytes;
    }
    Ok(())
}

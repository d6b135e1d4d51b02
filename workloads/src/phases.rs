//! Runs a workload in the phases used in GPUvm's figures.

use crate::{Gpu, Setup, Workload};
use anyhow::{Context, Result};
use std::time::{Duration, Instant};

/// A part of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Creates programs and buffers.
    Init,
    /// Copies from host to device.
    Upload,
    /// Runs kernels to completion.
    Launch,
    /// Copies from device to host.
    Download,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 4] = [Self::Init, Self::Upload, Self::Launch, Self::Download];

    /// Returns the name used in reports and in the paper.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::Upload => "htod",
            Self::Launch => "launch",
            Self::Download => "dtoh",
        }
    }
}

/// Times of a run, and the amount of data checked. Excludes the time that the caller needs to close the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Duration of each phase, in the order of [`Phase::ALL`].
    pub times: [Duration; 4],
    /// Time spent on freeing the buffers, which is part of closing.
    pub freed: Duration,
    /// Number of bytes compared with the CPU's result.
    pub verified: u64,
}

/// Runs a workload, checks its result, and frees its buffers.
///
/// # Errors
/// Returns an error if the device reports an error, or if the result is wrong. The error names the workload.
pub fn run(workload: &dyn Workload, gpu: &mut dyn Gpu) -> Result<Report> {
    let mut run = Run::new(workload);
    for phase in Phase::ALL {
        run.step(phase, gpu)?;
    }
    run.end(gpu)
}

/// A run that allows the caller to inspect the device between phases.
pub struct Run<'a> {
    workload: &'a dyn Workload,
    setup: Option<Setup>,
    times: [Duration; 4],
}

impl<'a> Run<'a> {
    /// Creates a run that has not started.
    #[must_use]
    pub fn new(workload: &'a dyn Workload) -> Self {
        Self { workload, setup: None, times: [Duration::ZERO; 4] }
    }

    /// Executes a phase, and waits for its work. Each phase of [`Phase::ALL`] must be executed once, in this order.
    ///
    /// # Errors
    /// Returns an error if the device reports an error.
    pub fn step(&mut self, phase: Phase, gpu: &mut dyn Gpu) -> Result<()> {
        let began = Instant::now();
        execute(phase, self.workload, gpu, &mut self.setup)
            .with_context(|| format!("{} in phase {}", self.workload.name(), phase.name()))?;
        self.times[phase as usize] += began.elapsed();
        Ok(())
    }

    /// Checks the result, and frees the buffers.
    ///
    /// # Errors
    /// Returns an error if the device reports an error, or if the result is wrong.
    pub fn end(self, gpu: &mut dyn Gpu) -> Result<Report> {
        let Self { workload, setup, times } = self;
        let setup = setup.context("the buffers have been created")?;
        let verified =
            workload.check(setup.results()).with_context(|| format!("{} produced a wrong result", workload.name()))?;
        let began = Instant::now();
        setup.free(gpu)?;
        Ok(Report { times, freed: began.elapsed(), verified })
    }
}

fn execute(phase: Phase, workload: &dyn Workload, gpu: &mut dyn Gpu, slot: &mut Option<Setup>) -> Result<()> {
    let setup = match slot {
        Some(setup) => setup,
        None => slot.insert(Setup::new(workload, gpu)?),
    };
    match phase {
        Phase::Init => {}
        Phase::Upload => setup.upload(gpu)?,
        Phase::Launch => workload.launch(gpu, setup)?,
        Phase::Download => setup.download(gpu)?,
    }
    gpu.finish()
}

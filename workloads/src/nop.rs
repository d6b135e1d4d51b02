//! An empty workload, which measures the cost of opening and closing the device.

use crate::{Gpu, Results, Setup, Slot, Workload};
use anyhow::Result;

/// A workload without kernels or buffers.
#[derive(Debug)]
pub(crate) struct Nop;

impl Workload for Nop {
    fn name(&self) -> &'static str {
        "nop"
    }

    fn size(&self) -> String {
        "nothing".to_owned()
    }

    fn source(&self) -> &'static str {
        ""
    }

    fn buffers(&self) -> Vec<Slot> {
        Vec::new()
    }

    fn launch(&self, _: &mut dyn Gpu, _: &Setup) -> Result<()> {
        Ok(())
    }

    fn check(&self, _: &Results) -> Result<u64> {
        Ok(0)
    }
}

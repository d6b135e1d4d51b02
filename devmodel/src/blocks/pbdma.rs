//! PBDMA error registers. The mediator handles all other PBDMA functions.

use super::{At, Backlog, Cx};
use crate::events::PbdmaError;
use nvspec::regs::pbdma::{METHOD_0, Reg};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Number of PBDMAs in the register layout.
const UNITS: usize = nvspec::regs::pbdma::INTR_0::COUNT as usize;

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Unit {
    intr: u32,
    intr_en: u32,
    method: u32,
    data: u32,
    channel: u32,
}

/// Visible error of each PBDMA, and queued errors.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pbdma {
    units: [Unit; UNITS],
    backlog: Backlog<PbdmaError>,
}

impl Pbdma {
    pub(crate) fn read(&self, reg: Reg, at: At, cx: &Cx) -> u32 {
        let Some(unit) = self.units.get(at.index()) else { return 0 };
        match reg {
            Reg::METHOD_0 => unit.method,
            Reg::DATA_0 => unit.data,
            Reg::INTR_0 => unit.intr,
            Reg::INTR_EN_0 => unit.intr_en,
            Reg::CHANNEL => unit.channel,
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: Reg, at: At, value: u32, cx: &mut Cx) {
        let Some(unit) = self.units.get_mut(at.index()) else { return };
        match reg {
            Reg::METHOD_0 => unit.method = value,
            Reg::DATA_0 => unit.data = value,
            Reg::INTR_EN_0 => unit.intr_en = value,
            Reg::INTR_0 => {
                unit.intr &= !value;
                if unit.intr == 0
                    && let Some(next) = self.backlog.take(|error| error.unit == at.index)
                {
                    unit.show(&next);
                }
            }
            Reg::CHANNEL => {}
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn reset(&mut self) {
        let Self { units, backlog } = self;
        *units = Default::default();
        backlog.clear();
    }

    /// Validates restored state.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { units: _, backlog } = self;
        backlog.check(|error| (error.unit as usize) < UNITS)
    }

    /// Shows an error in the registers, or queues it until the guest has acknowledged the visible error.
    pub(crate) fn error(&mut self, error: PbdmaError) {
        match self.units.get_mut(error.unit as usize) {
            Some(unit) if unit.intr == 0 => unit.show(&error),
            Some(_) => self.backlog.push(error),
            None => {}
        }
    }

    /// Returns the mask of PBDMAs with an enabled, pending interrupt.
    pub(crate) fn pending(&self) -> u32 {
        let mut bits = 0;
        for (index, unit) in (0u32..).zip(&self.units) {
            if unit.intr & unit.intr_en != 0 {
                bits |= 1u32.wrapping_shl(index);
            }
        }
        bits
    }
}

impl Unit {
    fn show(&mut self, error: &PbdmaError) {
        self.intr = error.intr;
        self.method = METHOD_0::VALID.mask()
            | METHOD_0::SUBCHANNEL.encode(error.subchannel)
            | (error.method & METHOD_0::METHOD.mask());
        self.data = error.data;
        self.channel = u32::from(error.channel.0);
    }
}

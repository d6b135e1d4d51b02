//! PBUS: the location of the PRAMIN window, and the instance blocks of the apertures.

use super::{At, Cx};
use crate::backend::Aperture;
use crate::denied::Reason;
use nvspec::addr::{GuestVramAddr, Target};
use nvspec::regs::pbus::{BAR1_BLOCK, BAR3_BLOCK, INTR, INTR_EN, PEEPHOLE_BLOCK, PRAMIN_WINDOW, Reg};
use nvspec::regs::windows::pramin;
use serde::{Deserialize, Serialize};

/// Values of the address registers, as written by the guest.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Pbus {
    window: u32,
    bar1: u32,
    bar3: u32,
    peephole: u32,
}

impl Pbus {
    pub(crate) fn read(&self, reg: Reg, at: At, cx: &Cx) -> u32 {
        match reg {
            Reg::PRAMIN_WINDOW => self.window,
            Reg::BAR1_BLOCK => self.bar1,
            Reg::BAR3_BLOCK => self.bar3,
            Reg::PEEPHOLE_BLOCK => self.peephole,
            _ => cx.plain_read(at),
        }
    }

    pub(crate) fn write(&mut self, reg: Reg, at: At, value: u32, cx: &mut Cx) {
        match reg {
            Reg::PRAMIN_WINDOW => {
                self.window = value & (PRAMIN_WINDOW::TARGET.mask() | PRAMIN_WINDOW::BASE.mask());
                cx.backend.place_window(self.window_base());
            }
            Reg::BAR1_BLOCK => {
                self.bar1 = value;
                let bound = BAR1_BLOCK::VALID.is_set(value);
                bind(at, value, bound.then_some((BAR1_BLOCK::TARGET, BAR1_BLOCK::ADDRESS)), Aperture::Bar1, cx);
            }
            Reg::BAR3_BLOCK => {
                self.bar3 = value;
                let bound = BAR3_BLOCK::VALID.is_set(value);
                bind(at, value, bound.then_some((BAR3_BLOCK::TARGET, BAR3_BLOCK::ADDRESS)), Aperture::Bar3, cx);
            }
            Reg::PEEPHOLE_BLOCK => {
                self.peephole = value;
                if PEEPHOLE_BLOCK::VALID.is_set(value) {
                    cx.deny_write(at, Reason::Unsupported, value);
                }
            }
            _ => cx.plain_write(at, value),
        }
    }

    pub(crate) fn reset(&mut self) {
        let Self { window, bar1, bar3, peephole } = self;
        (*window, *bar1, *bar3, *peephole) = (0, 0, 0, 0);
    }

    /// Returns the VRAM address of byte `offset` of BAR0, which must be in the window. Returns an error with the reason
    /// if the access is denied.
    pub(crate) fn window(&self, offset: u64, bytes: u64, vram_bytes: u64) -> Result<GuestVramAddr, Reason> {
        let base = self.window_base().ok_or(Reason::Target)?;
        let address = offset.checked_sub(u64::from(pramin::BASE)).and_then(|within| base.checked_add(within));
        let end = address.and_then(|address| address.checked_add(bytes));
        match (address, end) {
            (Some(address), Some(end)) if end.0 <= vram_bytes => Ok(address),
            _ => Err(Reason::OutsideVram),
        }
    }

    /// Returns the VRAM address of the window's start, or `None` if the window is not in VRAM. The window may extend
    /// beyond the end of the guest's VRAM.
    pub(crate) fn window_base(&self) -> Option<GuestVramAddr> {
        let is_vram = Target::from_bits(PRAMIN_WINDOW::TARGET.get(self.window)) == Target::Vram;
        is_vram.then(|| GuestVramAddr(u64::from(PRAMIN_WINDOW::BASE.get(self.window)) << 16))
    }

    /// Returns true if PBUS has an enabled, pending interrupt.
    pub(crate) fn pending(storage: &crate::storage::Storage) -> bool {
        storage.get(INTR::OFFSET) & storage.get(INTR_EN::OFFSET) != 0
    }

    /// Returns the values of the address registers of the window, BAR1 and BAR3, as written by the guest.
    #[must_use]
    pub fn registers(&self) -> [u32; 3] {
        [self.window, self.bar1, self.bar3]
    }
}

type Fields = (nvspec::Field, nvspec::Field);

fn bind(at: At, value: u32, fields: Option<Fields>, aperture: Aperture, cx: &mut Cx) {
    let instance = fields.and_then(|(target, address)| cx.instance(at, value, target.get(value), address.get(value)));
    cx.backend.bind_aperture(aperture, instance);
}

//! Common parts of all virtual falcons (PMU, copy engines, FECS, GPCCS). They do not execute code: uploads are only
//! stored, and the modules that use a falcon implement the behaviour of its firmware.

use nvspec::falcon::CODE_WORDS_MAX;
use nvspec::regs::fecs::{DMEM_CONTROL, IMEM_CONTROL};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Number of dwords that a data port can address.
const DMEM_DWORDS: usize = 0x1_0000 / 4;
/// Maximum number of data ports. Only the PMU has more than one.
const PORTS: usize = 8;

/// Data memory of a falcon, and its ports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Dmem {
    /// Contents, up to the last written dword.
    dwords: Vec<u32>,
    control: [u32; PORTS],
}

impl Dmem {
    /// Reads a port's address register.
    #[must_use]
    pub fn control(&self, port: usize) -> u32 {
        self.control.get(port).copied().unwrap_or(0)
    }

    /// Writes a port's address register.
    pub fn set_control(&mut self, port: usize, value: u32) {
        if let Some(control) = self.control.get_mut(port) {
            *control = value;
        }
    }

    /// Reads the dword at a port's address.
    pub fn read(&mut self, port: usize) -> u32 {
        let value = self.dwords.get(self.place(port)).copied().unwrap_or(0);
        self.advance(port, DMEM_CONTROL::READ_INCREMENT);
        value
    }

    /// Writes the dword at a port's address.
    pub fn write(&mut self, port: usize, value: u32) {
        let at = self.place(port);
        if at >= self.dwords.len() && at < DMEM_DWORDS {
            self.dwords.resize(at.saturating_add(1), 0);
        }
        if let Some(dword) = self.dwords.get_mut(at) {
            *dword = value;
        }
        self.advance(port, DMEM_CONTROL::WRITE_INCREMENT);
    }

    /// Returns the contents up to the last written dword.
    #[must_use]
    pub fn dwords(&self) -> &[u32] {
        &self.dwords
    }

    /// Resets the addresses of all ports to 0. A falcon reset does not change the contents.
    pub fn reset(&mut self) {
        self.control = [0; PORTS];
    }

    /// Validates restored state.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { dwords, control: _ } = self;
        Invalid::unless(dwords.len() <= DMEM_DWORDS, || "a falcon's data memory is too large".into())
    }

    fn place(&self, port: usize) -> usize {
        (DMEM_CONTROL::ADDRESS.get(self.control(port)) / 4) as usize
    }

    fn advance(&mut self, port: usize, when: nvspec::Field) {
        if let Some(control) = self.control.get_mut(port)
            && when.is_set(*control)
        {
            *control = DMEM_CONTROL::ADDRESS.with(*control, DMEM_CONTROL::ADDRESS.get(*control).wrapping_add(4));
        }
    }
}

/// Code memory of a falcon, which drivers write. The code is not executed, but identifies the guest's firmware.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Imem {
    /// Contents, up to the last written dword.
    dwords: Vec<u32>,
    control: u32,
}

impl Imem {
    /// Validates restored state.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { dwords, control: _ } = self;
        Invalid::unless(dwords.len() <= CODE_WORDS_MAX, || "a falcon's code memory is too large".into())
    }

    /// Reads the address register.
    #[must_use]
    pub fn control(&self) -> u32 {
        self.control
    }

    /// Writes the address register.
    pub fn set_control(&mut self, value: u32) {
        self.control = value;
    }

    /// Writes the dword at the current address.
    pub fn write(&mut self, value: u32) {
        let address = IMEM_CONTROL::ADDRESS.get(self.control);
        let at = (address / 4) as usize;
        if at >= self.dwords.len() && at < CODE_WORDS_MAX {
            self.dwords.resize(at.saturating_add(1), 0);
        }
        if let Some(dword) = self.dwords.get_mut(at) {
            *dword = value;
        }
        if IMEM_CONTROL::WRITE_INCREMENT.is_set(self.control) {
            self.control = IMEM_CONTROL::ADDRESS.with(self.control, address.wrapping_add(4));
        }
    }

    /// Returns the contents up to the last written dword.
    #[must_use]
    pub fn dwords(&self) -> &[u32] {
        &self.dwords
    }
}

/// Interrupt registers of a falcon.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Intr {
    /// Mask of the pending interrupts.
    pub status: u32,
    /// Mask of the enabled interrupts.
    pub enable: u32,
}

impl Intr {
    /// Returns true if an enabled interrupt is pending.
    #[must_use]
    pub fn pending(self) -> bool {
        self.status & self.enable != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn upload_reads_back_with_increment() {
        let mut dmem = Dmem::default();
        dmem.set_control(0, 0x0100_0010);
        for value in [7, 8, 9] {
            dmem.write(0, value);
        }
        dmem.set_control(0, 0x0200_0010);
        assert_eq!([dmem.read(0), dmem.read(0), dmem.read(0), dmem.read(0)], [7, 8, 9, 0]);
    }

    #[test]
    fn a_port_without_increment_stays() {
        let mut dmem = Dmem::default();
        dmem.set_control(3, 0x20);
        dmem.write(3, 1);
        dmem.write(3, 2);
        assert_eq!((dmem.read(3), dmem.control(3)), (2, 0x20));
    }

    #[test]
    fn the_memory_does_not_grow_beyond_its_address_field() {
        let mut dmem = Dmem::default();
        dmem.set_control(0, 0x0100_fffc);
        dmem.write(0, 1);
        assert_eq!(dmem.control(0), 0x0100_0000, "the address wraps within its field");
        assert!(dmem.dwords.len() <= DMEM_DWORDS);
    }
}

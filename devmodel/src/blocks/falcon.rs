//! Common parts of all falcons (PMU, copy engines, FECS, GPCCS). The modelled falcons do not execute code: uploads are
//! only stored, and each user of this module implements the behaviour of its firmware.

use nvspec::falcon::CODE_WORDS_MAX;
use nvspec::regs::fecs::{DMEM_CONTROL, IMEM_CONTROL};
use saved_state::Invalid;
use serde::{Deserialize, Serialize};

/// Number of dwords that the data port can address.
const DMEM_DWORDS: usize = 0x1_0000 / 4;
/// Number of data ports. Only the PMU has more than one.
const PORTS: usize = 8;

/// A falcon's data memory and its ports.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Dmem {
    /// Contents, which grow on demand.
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

    /// Reads a dword at a port's address.
    pub fn read(&mut self, port: usize) -> u32 {
        let value = self.dwords.get(self.place(port)).copied().unwrap_or(0);
        self.advance(port, DMEM_CONTROL::READ_INCREMENT);
        value
    }

    /// Writes a dword at a port's address.
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

    /// Returns all written dwords.
    #[must_use]
    pub fn dwords(&self) -> &[u32] {
        &self.dwords
    }

    /// Resets the ports to address 0. A falcon reset preserves the contents.
    pub fn reset(&mut self) {
        self.control = [0; PORTS];
    }

    /// Validates saved data.
    pub(crate) fn check(&self) -> Result<(), Invalid> {
        let Self { dwords, control: _ } = self;
        Invalid::unless(dwords.len() <= DMEM_DWORDS, || "a falcon's memory is too large".into())
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

/// A falcon's code memory, which drivers fill. The code is not executed; it only identifies the guest's firmware.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Imem {
    /// Contents, which grow on demand.
    dwords: Vec<u32>,
    control: u32,
}

impl Imem {
    /// Validates saved data.
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

    /// Writes a dword at the address.
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

    /// Returns all written dwords.
    #[must_use]
    pub fn dwords(&self) -> &[u32] {
        &self.dwords
    }
}

/// A falcon's interrupt registers.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Intr {
    /// Pending interrupts.
    pub status: u32,
    /// Enabled interrupts.
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
        assert_eq!(dmem.control(0), 0x0100_0000, "wraps within the field");
        assert!(dmem.dwords.len() <= DMEM_DWORDS);
    }
}

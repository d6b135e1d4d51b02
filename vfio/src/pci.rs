//! Configuration space of a function behind VFIO: identity, power state, and memory access enables.
//!
//! Sources: PCI Local Bus 3.0 chapter 6, PCI Power Management 1.2 chapter 3.

use std::io;

use crate::bar::Bar;

mod header {
    pub const VENDOR: u64 = 0x00;
    pub const DEVICE: u64 = 0x02;
    pub const COMMAND: u64 = 0x04;
    pub const STATUS: u64 = 0x06;
    pub const REVISION: u64 = 0x08;
    pub const CLASS: u64 = 0x09;
    pub const SUBSYSTEM_VENDOR: u64 = 0x2c;
    pub const SUBSYSTEM: u64 = 0x2e;
    pub const CAPABILITIES: u64 = 0x34;
}

/// Command register: the function responds to accesses to its memory BARs.
const MEMORY: u16 = 1 << 1;
/// Command register: the function may access memory.
const MASTER: u16 = 1 << 2;
/// Command register: the function must not assert INTx.
const INTX_OFF: u16 = 1 << 10;
/// Status register: the function has a capability list.
const LISTED: u16 = 1 << 4;
/// ID of the power management capability.
const POWER: u8 = 0x01;
/// Offset of the control register in the power management capability.
const POWER_CONTROL: u64 = 4;
/// Power state mask in the control register.
const POWER_STATE: u16 = 3;
/// Maximum number of capabilities that fit in 256 bytes.
const MAX_CAPABILITIES: usize = 48;

/// Returns the identity of a function: vendor, device, subsystem vendor, subsystem, revision, class.
pub fn identity(config: &Bar) -> io::Result<(u16, u16, u16, u16, u8, u32)> {
    let short = |at| config.try_read(at).map(u16::from_le_bytes);
    let [low, mid, high] = config.try_read(header::CLASS)?;
    let [revision] = config.try_read(header::REVISION)?;
    Ok((
        short(header::VENDOR)?,
        short(header::DEVICE)?,
        short(header::SUBSYSTEM_VENDOR)?,
        short(header::SUBSYSTEM)?,
        revision,
        u32::from_le_bytes([low, mid, high, 0]),
    ))
}

/// Wakes a sleeping function. The kernel waits until it is awake. A function without power management is always awake.
///
/// # Errors
/// Returns an error if configuration space cannot be accessed, or if the function remains asleep.
pub fn wake(config: &Bar) -> io::Result<()> {
    let Some(at) = capability(config, POWER)? else { return Ok(()) };
    let at = at + POWER_CONTROL;
    let control = u16::from_le_bytes(config.try_read(at)?);
    if control & POWER_STATE == 0 {
        return Ok(());
    }
    config.try_write(at, &(control & !POWER_STATE).to_le_bytes())?;
    let control = u16::from_le_bytes(config.try_read(at)?);
    if control & POWER_STATE == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!("it stays in power state D{}", control & POWER_STATE)))
}

/// Enables a function's memory BARs and INTx. Allows the function to access memory if `master` is true, or forbids it
/// otherwise.
///
/// # Errors
/// Returns an error if configuration space cannot be accessed, or does not keep the setting.
pub fn set_enabled(config: &Bar, master: bool) -> io::Result<()> {
    let command = u16::from_le_bytes(config.try_read(header::COMMAND)?);
    let wanted = if master { command | MASTER } else { command & !MASTER };
    let wanted = (wanted | MEMORY) & !INTX_OFF;
    config.try_write(header::COMMAND, &wanted.to_le_bytes())?;
    let now = u16::from_le_bytes(config.try_read(header::COMMAND)?);
    let kept = (now ^ wanted) & (MEMORY | MASTER) == 0;
    if kept { Ok(()) } else { Err(io::Error::other(format!("its command register reads {now:#06x}"))) }
}

/// Returns the offset of a capability, or `None` if the function lacks it.
fn capability(config: &Bar, id: u8) -> io::Result<Option<u64>> {
    if u16::from_le_bytes(config.try_read(header::STATUS)?) & LISTED == 0 {
        return Ok(None);
    }
    let [mut at] = config.try_read(header::CAPABILITIES)?;
    for _ in 0..MAX_CAPABILITIES {
        let place = u64::from(at & !3);
        if place == 0 {
            break;
        }
        let [found, next] = config.try_read(place)?;
        if found == id {
            return Ok(Some(place));
        }
        at = next;
    }
    Ok(None)
}

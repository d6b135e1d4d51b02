//! The PCI function as the domain sees it: the addresses of its BARs, and its interrupts.
//!
//! The device stores the configuration space. This module rereads it after each guest write.

use std::sync::Arc;

use parking_lot::Mutex;
use vmm_glue::counters::{add, worth_logging};
use vmm_glue::device::{AccessError, Device, NUM_REGIONS, RegionIndex, RegionInfo};
use vmm_glue::link::Link;

use crate::bar_backing::{BarBacking, Window};
use crate::hypervisor::{Range, Target};

/// PCI configuration space offsets. Source: PCI Local Bus 3.0, chapter 6.
mod config {
    pub const COMMAND: u64 = 0x04;
    pub const STATUS: u64 = 0x06;
    pub const BARS: u64 = 0x10;
    pub const CAPABILITIES: u64 = 0x34;
    pub const MSI: u8 = 0x05;
}

const COMMAND_MEMORY: u32 = 1 << 1;
const COMMAND_MASTER: u32 = 1 << 2;
const COMMAND_INTX_OFF: u32 = 1 << 10;
const STATUS_CAPABILITIES: u32 = 1 << 4;
const BAR_IO: u32 = 1;
const BAR_TYPE: u32 = 6;
const BAR_64: u32 = 4;
const MSI_ENABLE: u32 = 1 << 16;
const MSI_64: u32 = 1 << 23;
/// Number of BARs per function.
const BARS: usize = 6;
/// Maximum number of capabilities to read, which is the number that fit in configuration space.
const MAX_CAPABILITIES: usize = 48;

/// Address and data of the device's MSI message.
type Message = Arc<Mutex<(u64, u32)>>;

/// A function in a domain.
pub(crate) struct Function {
    link: Link,
    target: Arc<dyn Target>,
    regions: [RegionInfo; NUM_REGIONS],
    /// Offset of the MSI capability in configuration space, if the device has one.
    msi: Option<u64>,
    message: Message,
    by_message: bool,
    by_pin: bool,
    /// Level of the pin in the domain.
    pin: Arc<Mutex<bool>>,
    /// Enabled and claimed BARs, in address order.
    windows: Vec<Window>,
    bar_backing: BarBacking,
    pub bus_master: bool,
    unclaimed: u64,
}

impl Function {
    pub fn new(link: &Link, target: &Arc<dyn Target>, device: &mut dyn Device) -> Self {
        let regions = device.regions();
        let bar_backing = BarBacking::new(&regions);
        let mut this = Self {
            link: link.clone(),
            target: Arc::clone(target),
            regions,
            msi: None,
            message: Message::default(),
            by_message: false,
            by_pin: false,
            pin: Arc::default(),
            windows: Vec::new(),
            bar_backing,
            bus_master: false,
            unclaimed: 0,
        };
        this.msi = this.find_msi(device);
        this
    }

    /// Returns the region of a BAR or of configuration space.
    pub fn region(&self, region: RegionIndex) -> Option<&RegionInfo> {
        self.regions.get(usize::from(region as u8))
    }

    /// Returns the enabled and claimed BARs, in address order.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// Rereads configuration space after a write, and updates the claimed addresses, the domain pages under the BARs,
    /// and the interrupt routing.
    pub fn look(&mut self, device: &mut dyn Device) {
        let command = word(device, config::COMMAND);
        self.bus_master = command & COMMAND_MASTER != 0;
        let windows = if command & COMMAND_MEMORY != 0 { self.placed(device) } else { Vec::new() };
        self.move_to(windows);
        self.bar_backing.follow(&self.windows, &*self.target, device);
        let message = self.msi.map(|at| self.read_message(device, at));
        let by_message = message.is_some_and(|(enabled, ..)| enabled);
        if let Some((_, address, data)) = message {
            *self.message.lock() = (address, data);
        }
        self.route(by_message, !by_message && command & COMMAND_INTX_OFF == 0);
    }

    /// Returns true if the pin is asserted.
    pub fn is_up(&self) -> bool {
        *self.pin.lock()
    }

    /// Deasserts the pin on a guest access that may have removed the cause. The pin is asserted again if the cause
    /// remains.
    pub fn acknowledge(&self) {
        let was_up = std::mem::take(&mut *self.pin.lock());
        if was_up {
            // This fails if the domain no longer exists.
            let _ = self.target.set_intx(false);
            self.link.interrupts().unmask_intx();
        }
    }

    /// Releases all windows and interrupts.
    pub fn leave(&mut self) {
        self.move_to(Vec::new());
        self.bar_backing.leave(&*self.target);
        self.route(false, false);
        if std::mem::take(&mut *self.pin.lock()) {
            let _ = self.target.set_intx(false);
        }
    }

    fn find_msi(&self, device: &mut dyn Device) -> Option<u64> {
        if word(device, config::STATUS & !3) >> 16 & STATUS_CAPABILITIES == 0 {
            return None;
        }
        let mut at = word(device, config::CAPABILITIES) & 0xfc;
        for _ in 0..MAX_CAPABILITIES {
            let [id, next, ..] = word(device, at.into()).to_le_bytes();
            match (at, id) {
                (0, _) => return None,
                (_, config::MSI) => return Some(at.into()),
                _ => at = u32::from(next) & 0xfc,
            }
        }
        None
    }

    /// Reads the MSI capability: the enable flag, and the address and data of the first message.
    fn read_message(&self, device: &mut dyn Device, at: u64) -> (bool, u64, u32) {
        let of = |device: &mut dyn Device, offset: u64| word(device, at.saturating_add(offset));
        let control = of(device, 0);
        let low = u64::from(of(device, 4));
        let (high, data) = match control & MSI_64 {
            0 => (0, of(device, 8)),
            _ => (u64::from(of(device, 8)), of(device, 12)),
        };
        (control & MSI_ENABLE != 0, high << 32 | low, data & 0xffff)
    }

    /// Returns the BARs with valid guest addresses, in address order and without overlaps.
    fn placed(&self, device: &mut dyn Device) -> Vec<Window> {
        let mut windows = Vec::new();
        let mut number = 0;
        while number < BARS {
            let at = |number: usize| config::BARS.saturating_add(u64::try_from(number).unwrap_or(0).saturating_mul(4));
            let low = word(device, at(number));
            let wide = low & BAR_IO == 0 && low & BAR_TYPE == BAR_64;
            let high = if wide { word(device, at(number.saturating_add(1))) } else { 0 };
            let first = u64::from(high) << 32 | u64::from(low & !0xf);
            let region = RegionIndex::ALL.get(number).copied().filter(|_| low & BAR_IO == 0);
            let size = region.and_then(|region| self.region(region)).map_or(0, RegionInfo::size);
            let last = size.checked_sub(1).and_then(|rest| first.checked_add(rest));
            // A guest that probes the size writes a value that is not an address. A value of 0 is not an address
            // either.
            if let (Some(region), Some(last), true) = (region, last, first != 0) {
                windows.push(Window { region, range: Range { first, last } });
            }
            number = number.saturating_add(if wide { 2 } else { 1 });
        }
        windows.sort_unstable_by_key(|window| window.range.first);
        // Xen lets a server claim each address only once. If BARs overlap, the one with the lower address wins.
        let mut free = 0;
        windows.retain(|window| {
            let fits = window.range.first >= free;
            free = if fits { window.range.last.saturating_add(1) } else { free };
            fits
        });
        windows
    }

    /// Releases old windows, then claims new ones.
    fn move_to(&mut self, windows: Vec<Window>) {
        for window in self.windows.iter().filter(|window| !windows.contains(window)) {
            if let Err(error) = self.target.disclaim(window.range) {
                tracing::debug!(%error, ?window, "cannot release a BAR's addresses: the domain no longer exists");
            }
        }
        let before = std::mem::take(&mut self.windows);
        for window in windows {
            if before.contains(&window) {
                self.windows.push(window);
                continue;
            }
            match self.target.claim(window.range) {
                Ok(()) => self.windows.push(window),
                Err(error) => {
                    self.unclaimed = self.unclaimed.saturating_add(1);
                    if worth_logging(self.unclaimed) {
                        tracing::warn!(%error, ?window, "Xen does not forward accesses to a BAR");
                    }
                }
            }
        }
    }

    fn route(&mut self, by_message: bool, by_pin: bool) {
        let interrupts = self.link.interrupts();
        if by_message != self.by_message {
            self.by_message = by_message;
            let (target, message) = (Arc::clone(&self.target), Arc::clone(&self.message));
            let deliver = move || {
                let (address, data) = *message.lock();
                target.inject_msi(address, data).is_ok()
            };
            interrupts.deliver_msi(by_message.then(|| Arc::new(deliver) as _));
        }
        if by_pin != self.by_pin {
            self.by_pin = by_pin;
            let (target, pin) = (Arc::clone(&self.target), Arc::clone(&self.pin));
            let deliver = move || {
                *pin.lock() = true;
                target.set_intx(true).is_ok()
            };
            interrupts.deliver_intx(by_pin.then(|| Arc::new(deliver) as _));
            if !by_pin && std::mem::take(&mut *self.pin.lock()) {
                let _ = self.target.set_intx(false);
            }
        }
    }

    /// Counts a denied access, and logs it occasionally.
    pub fn denied(&self, error: AccessError) {
        let before = add(&self.link.counters().denied, 1);
        if worth_logging(before.saturating_add(1)) {
            tracing::warn!(%error, "denied an access by the domain");
        }
    }
}

/// Returns the dword of configuration space that contains `offset`, or 0 if the device denies the read.
fn word(device: &mut dyn Device, offset: u64) -> u32 {
    let mut bytes = [0; 4];
    match device.region_read(RegionIndex::Config, offset & !3, &mut bytes) {
        Ok(()) => u32::from_le_bytes(bytes),
        Err(_) => 0,
    }
}

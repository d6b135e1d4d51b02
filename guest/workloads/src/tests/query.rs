//! Queries card parameters from the kernel.

use anyhow::{Result, ensure};

use super::Facts;
use crate::options::Options;
use crate::rig::Rig;
use gdev::nouveau::uapi::param;

/// Number of PTIMER readings. None may be lower than the previous one.
const READINGS: usize = 100;

/// Queries every parameter, and checks that the clock advances.
pub fn run(rig: &Rig, _options: &Options) -> Result<Facts> {
    let get = |param| rig.device().parameter(param);
    let chipset = get(param::CHIPSET_ID)?;
    let (vram, gart) = (get(param::FB_SIZE)?, get(param::GART_SIZE)?);
    let (vendor, device) = (get(param::PCI_VENDOR)?, get(param::PCI_DEVICE)?);
    ensure!(vendor == 0x10de, "PCI vendor is {vendor:04x}");
    ensure!(vram > 0 && gart > 0, "VRAM {vram} bytes, GART {gart} bytes");
    let units = get(param::GRAPH_UNITS)?;

    let first = get(param::PTIMER_TIME)?;
    let mut last = first;
    for reading in 0..READINGS {
        let now = get(param::PTIMER_TIME)?;
        ensure!(now >= last, "PTIMER went back at reading {reading}: {last} to {now}");
        last = now;
    }
    ensure!(last > first, "PTIMER stands still at {first} over {READINGS} readings");

    println!("chipset {chipset:#x}, {:.0} MiB of VRAM, PTIMER {last} ns", vram as f64 / f64::from(1 << 20));
    Ok(vec![
        ("chipset", format!("{chipset:#x}")),
        ("pci", format!("{vendor:04x}:{device:04x}")),
        ("vram", vram.to_string()),
        ("gart", gart.to_string()),
        ("bus", get(param::BUS_TYPE)?.to_string()),
        ("gpcs", (units & 0xff).to_string()),
        ("tpcs", (units >> 8 & 0xff_ffff).to_string()),
        ("rops", (units >> 32 & 0xff).to_string()),
        ("ptimer_ns", (last - first).to_string()),
    ])
}

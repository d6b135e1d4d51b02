//! Tries to reach memory outside the share through every pointer that a guest can set.
//!
//! Each type of attack first runs on our own memory (`armed`), because otherwise an empty result would prove nothing.
//! If `--share` is less than the VRAM that the card reports, the command must fail, because the rest is then treated as
//! another VM's VRAM. Afterwards, a driver must reinitialize the card.

use anyhow::{Result, bail, ensure};

use super::attack::{BRAND, Found, Ground, MARKER};
use super::card::Card;
use super::channel;
use super::layout::{Aperture, CHANNELS, LARGE_PAGE, PAGE, instance_pointer, own, reg};
use crate::options::{Options, hex_bytes};
use crate::pattern::{Random, mix};
use crate::rig::Counts;
use crate::tests::Facts;
use gdev::mapping::{Mapping, Width};

/// Virtual address in BAR1 and BAR3 at which our own data page is mapped.
const OWN_VA: u64 = 0x10_0000;
/// Lowest virtual address at which pages outside the share are mapped.
const OUTSIDE_VA: u64 = 0x20_0000;
/// Lowest virtual address at which large pages outside the share are mapped.
const LARGE_VA: u64 = 0x400_0000;
/// Start of the address range in which no test guest has RAM.
pub const BEYOND_GUEST_RAM: u64 = 1 << 39;
/// Number of dwords read from each page.
const READS: u64 = 4;

/// Runs `bar hostile`.
pub fn run(card: &Card, options: &Options) -> Result<(Counts, Facts)> {
    let pattern = options.text("pattern").map(hex_bytes).transpose()?.unwrap_or_default();
    ensure!(pattern.is_empty() || pattern.len() >= 4, "--pattern must have 4 bytes or more");
    let probes = options.number("probes", 48)?.min(4096);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let seed = options.number("seed", mix(now.as_nanos() as u64))?;
    let boot0 = card.read(reg::BOOT0);
    ensure!(boot0 != u32::MAX && boot0 != 0, "the card does not respond: BOOT0 is {boot0:#x}");
    let share = options.number("share", card.vram()?)?;
    let mut ground = Ground::new(card, share, Random(seed), pattern, !options.flag("no-writes"))?;
    ground.mapped = options.flag("mapped");
    // Clearing takes one access per dword, and is unnecessary after a reset.
    if !options.flag("fresh") {
        card.vram_zero(ground.base, own::END);
    }
    println!("hostile: seed {seed}, {} MiB of VRAM", ground.vram >> 20);

    card.vram_write(ground.base + own::DATA, MARKER);
    let window_armed = card.vram_read(ground.base + own::DATA) == MARKER;
    window(&mut ground, probes);
    let aperture_armed = apertures(&mut ground, probes)?;
    tables(&mut ground, probes / 4 + 1);
    pointers(&mut ground, probes / 4 + 1);
    let most = usize::try_from(options.number("channels", u64::MAX)?).unwrap_or(usize::MAX);
    let channels = channel::attack(&mut ground, probes / 8 + 1, most)?;
    let alive = ground.alive(boot0);
    clean(card);

    let Found { probes, nonzero, sticky, hits, pokes } = ground.found;
    let facts = vec![
        ("probes", probes.to_string()),
        ("pokes", pokes.to_string()),
        ("nonzero", nonzero.to_string()),
        ("sticky", sticky.to_string()),
        ("hits", hits.to_string()),
        ("armed_window", window_armed.to_string()),
        ("armed_aperture", aperture_armed.to_string()),
        ("armed_channel", channels.armed.to_string()),
        ("passed", channels.passed.to_string()),
        ("alive", alive.to_string()),
    ];
    if !(window_armed && aperture_armed && alive) || nonzero + sticky + hits + channels.reached > 0 {
        let facts: Vec<String> = facts.iter().map(|(name, value)| format!("{name}={value}")).collect();
        bail!("{} reached={}", facts.join(" "), channels.reached);
    }
    Ok((Counts { bytes: probes * 4, copies: 0, channels: channels.count }, facts))
}

/// Tries to access VRAM outside the share, and system memory that is not guest RAM, through the PRAMIN window.
fn window(ground: &mut Ground<'_>, probes: u64) {
    for address in ground.outside(1 << 16, probes) {
        for target in [0, 2, 3] {
            // RAM at low addresses may belong to the guest itself.
            let address = if target == 0 { address } else { address | BEYOND_GUEST_RAM };
            ground.poke(reg::PRAMIN_WINDOW, (address >> 16) as u32 | target << 24);
            for read in 0..READS {
                let register = reg::PRAMIN + (read * 0x3f84) as u32;
                let word = ground.card.read(register);
                ground.judge_aperture(&format!("window at {address:#x}, target {target}"), word);
                if ground.writes && target == 0 {
                    ground.poke(register, BRAND);
                    let word = ground.card.read(register);
                    ground.judge_aperture(&format!("window at {address:#x}, after a write"), word);
                }
            }
        }
    }
    // Point the window at our last 64 KiB, and access addresses beyond the end without moving the window.
    let last = ground.vram - (64 << 10);
    ground.poke(reg::PRAMIN_WINDOW, (last >> 16) as u32);
    for read in 0..READS {
        let word = ground.card.read(reg::PRAMIN + 0x1_0000 + (read * 0x2_0000) as u32);
        ground.judge_aperture("window across the end of VRAM", word);
    }
}

/// Sets up BAR1 and BAR3 with our own tables, and accesses pages outside the share. Returns true if our own page was
/// visible in both BARs.
fn apertures(ground: &mut Ground<'_>, probes: u64) -> Result<bool> {
    let base = ground.base;
    for (space, instance) in [own::BAR1_INSTANCE, own::BAR3_INSTANCE].into_iter().enumerate() {
        let small = Some((base + own::TABLES[space], Aperture::Vram));
        let large = (space == 0).then_some((base + own::LARGE_TABLE, Aperture::Vram));
        ground.set_directory(space, 0, large, small);
        ground.set_page(space, OWN_VA, base + own::DATA, Aperture::Vram);
        ground.set_instance(instance, base + own::DIRECTORIES[space], 0);
    }
    point_at_own(ground);
    let seen = |region: &Mapping| region.load(OWN_VA as usize, Width::Dword) as u32 == MARKER;
    let armed = ground.apertures.into_iter().all(seen);
    // If the VMM has mapped memory for all apertures, a page visible through another aperture is not visible through
    // PRAMIN, so hide it in the other apertures first.
    for space in 0..2 {
        ground.clear_page(space, OWN_VA);
        ground.flush(base + own::DIRECTORIES[space]);
    }

    let room = ground.apertures[1].bytes() as u64;
    ensure!(room > OUTSIDE_VA, "region 3 has only {room} bytes");
    let most = ((room - OUTSIDE_VA) / PAGE) as usize;
    for aperture in [Aperture::Vram, Aperture::Peer, Aperture::Coherent, Aperture::Noncoherent] {
        let addresses: Vec<u64> = match aperture {
            Aperture::Vram | Aperture::Peer => ground.outside(PAGE, probes),
            // Test absent RAM: far above the guest's RAM, and at random high addresses.
            _ => (0..probes)
                .map(|_| BEYOND_GUEST_RAM | ground.random.below(BEYOND_GUEST_RAM))
                .map(|at| at & !(PAGE - 1))
                .collect(),
        };
        let addresses = &addresses[..addresses.len().min(most)];
        for space in 0..2 {
            for (number, address) in addresses.iter().enumerate() {
                ground.set_page(space, OUTSIDE_VA + number as u64 * PAGE, *address, aperture);
            }
            ground.flush(base + own::DIRECTORIES[space]);
            for (number, address) in addresses.iter().enumerate() {
                let what = format!("BAR{} page at {address:#x} {aperture:?}", 2 * space + 1);
                look(ground, space, OUTSIDE_VA + number as u64 * PAGE, PAGE, &what);
            }
        }
    }
    let addresses = ground.outside(LARGE_PAGE, probes / 4 + 1);
    for (number, address) in addresses.iter().enumerate().take(64) {
        ground.set_large_page(LARGE_VA + number as u64 * LARGE_PAGE, *address, Aperture::Vram);
    }
    ground.flush(base + own::DIRECTORIES[0]);
    if ground.apertures[0].bytes() as u64 >= LARGE_VA + 64 * LARGE_PAGE {
        for (number, address) in addresses.iter().enumerate().take(64) {
            let what = format!("BAR1 large page at {address:#x}");
            look(ground, 0, LARGE_VA + number as u64 * LARGE_PAGE, LARGE_PAGE, &what);
        }
    }
    Ok(armed)
}

/// Points BAR1 and BAR3 at our own instance blocks.
fn point_at_own(ground: &Ground<'_>) {
    ground.card.write(reg::BAR1_INSTANCE, instance_pointer(ground.base + own::BAR1_INSTANCE, 0));
    ground.card.write(reg::BAR3_INSTANCE, instance_pointer(ground.base + own::BAR3_INSTANCE, 0));
    for directory in &own::DIRECTORIES[..2] {
        ground.flush(ground.base + directory);
    }
}

/// Reads a few dwords of a page in BAR1 (space 0) or BAR3 (space 1). If `ground.writes` is true, also writes the last
/// dword of the page.
fn look(ground: &mut Ground<'_>, space: usize, va: u64, length: u64, what: &str) {
    let region = ground.apertures[space];
    for read in 0..READS {
        let at = (va + (read * 0x5a4) % length) as usize;
        let word = region.load(at, Width::Dword) as u32;
        ground.judge_aperture(what, word);
    }
    if ground.writes {
        let at = (va + length - 4) as usize;
        region.store(at, Width::Dword, BRAND.into());
        let word = region.load(at, Width::Dword) as u32;
        ground.judge_aperture(&format!("{what}, after a write"), word);
    }
}

/// Tries page tables, page directories and instance blocks that are themselves outside the share.
fn tables(ground: &mut Ground<'_>, probes: u64) {
    let directory = ground.base + own::DIRECTORIES[0];
    for address in ground.outside(PAGE, probes) {
        for aperture in [Aperture::Vram, Aperture::Coherent] {
            let address = if aperture == Aperture::Vram { address } else { address | BEYOND_GUEST_RAM };
            ground.set_directory(0, 0, None, Some((address, aperture)));
            ground.flush(directory);
            look(ground, 0, OUTSIDE_VA, PAGE, &format!("BAR1 page table at {address:#x} {aperture:?}"));
            ground.set_directory(0, 0, Some((address, aperture)), None);
            ground.flush(directory);
            // Test an entry for a large page. The offset is valid for any BAR1 size.
            let large = (LARGE_VA / 2).min(ground.apertures[0].bytes() as u64 / 2);
            look(ground, 0, large, PAGE, &format!("BAR1 large page table at {address:#x} {aperture:?}"));
        }
        ground.set_instance(own::BAR1_INSTANCE, address, 0);
        point_at_own(ground);
        ground.flush(address);
        look(ground, 0, OWN_VA, PAGE, &format!("BAR1 page directory at {address:#x}"));
        ground.set_instance(own::BAR1_INSTANCE, directory, 0);
        for target in [0, 2, 3] {
            let address = if target == 0 { address } else { address | BEYOND_GUEST_RAM };
            for (space, register) in [reg::BAR1_INSTANCE, reg::BAR3_INSTANCE].into_iter().enumerate() {
                ground.poke(register, instance_pointer(address, target));
                ground.flush(address);
                look(ground, space, OWN_VA, PAGE, &format!("instance of BAR{} at {address:#x}", 2 * space + 1));
            }
        }
    }
    let small = Some((ground.base + own::TABLES[0], Aperture::Vram));
    ground.set_directory(0, 0, Some((ground.base + own::LARGE_TABLE, Aperture::Vram)), small);
    point_at_own(ground);
}

/// Writes addresses outside the share to all other registers that contain an address or a channel.
fn pointers(ground: &mut Ground<'_>, probes: u64) {
    for address in ground.outside(PAGE, probes) {
        let id = ground.random.below(CHANNELS.into()) as u32;
        let length = 1 + ground.random.below(256) as u32;
        for target in 0..4 {
            ground.poke(reg::CHANNEL + 8 * id, 0x4000_0000 | instance_pointer(address, target));
            ground.poke(reg::CHANNEL_STATE + 8 * id, 0x001f_0001);
            ground.poke(reg::RUNLIST, (address >> 12) as u32 & 0x0fff_ffff | target << 28);
            ground.poke(reg::RUNLIST_SUBMIT, 0x01f0_0000 | length);
        }
        ground.poke(reg::PREEMPT, id);
        ground.poke(reg::PEEPHOLE_INSTANCE, instance_pointer(address, 0));
        ground.poke(reg::PEEPHOLE[0], 0);
        ground.poke(reg::PEEPHOLE[1], OUTSIDE_VA as u32);
        ground.poke(reg::PEEPHOLE[2], BRAND);
        ground.poke(reg::FECS_DATA, instance_pointer(address, 0));
        ground.poke(reg::FECS_COMMAND, 1);
        for register in reg::FECS_CHANNELS.into_iter().chain(reg::CE_CHANNEL) {
            ground.poke(register, instance_pointer(address, 0));
        }
        for register in reg::GPC_MMU_SINKS.into_iter().chain([reg::SYSMEM_FLUSH, reg::TAG_BASE]) {
            ground.poke(register, (address >> 8) as u32);
        }
        for (register, value) in reg::CE_DMA.into_iter().zip([(address >> 8) as u32, 0, 0x600, 0]) {
            ground.poke(register, value);
        }
        ground.poke(reg::USERD_BASE, 0x1000_0000 | (address >> 12) as u32 & 0x0fff_ffff);
        ground.poke(reg::CHANNEL_STATE + 8 * id, 0);
        ground.poke(reg::CHANNEL + 8 * id, 0);
    }
    // Submit a runlist of all channels and some nonexistent ones.
    let list = ground.base + own::RUNLIST;
    for entry in 0..256u32 {
        ground.card.vram_write(list + u64::from(entry) * 8, if entry == 255 { u32::MAX } else { entry });
        ground.card.vram_write(list + u64::from(entry) * 8 + 4, 4);
    }
    ground.poke(reg::RUNLIST, (list >> 12) as u32);
    ground.poke(reg::RUNLIST_SUBMIT, 0x01f0_0000 | 256);
}

/// Removes all channels, resets the pointers of the windows, and clears PFIFO's interrupts.
fn clean(card: &Card) {
    card.write(reg::RUNLIST_SUBMIT, 0x01f0_0000);
    for id in 0..CHANNELS {
        card.write(reg::CHANNEL_STATE + 8 * id, 0);
        card.write(reg::CHANNEL + 8 * id, 0);
    }
    for register in [reg::BAR1_INSTANCE, reg::BAR3_INSTANCE, reg::PEEPHOLE_INSTANCE, reg::PRAMIN_WINDOW] {
        card.write(register, 0);
    }
    card.write(reg::PFIFO_INTR, u32::MAX);
}

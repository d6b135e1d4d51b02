//! Initializes a vGPU over a `mediatord` socket, without a VMM or a guest. Copies data within the vGPU's VRAM and to
//! RAM, and verifies every byte.
//!
//! Usage: `copies SOCKET VRAM_MIB ROUNDS`

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use rig::driver::{At, Driver, M2MF, PAGE, m2mf_copy, object};
use rig::{Machine as _, RemoteGuest};

/// Number of pages copied per round.
const PAGES: u64 = 64;
/// Virtual address of the source in the channel's address space.
const FROM: u64 = 0x100_0000;
const TO: u64 = 0x200_0000;
const RAM: u64 = 0x300_0000;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let socket = arguments.next().map(PathBuf::from);
    let mut number = || arguments.next().and_then(|text| text.parse::<u32>().ok());
    let (Some(socket), Some(vram_mib), Some(rounds)) = (socket, number(), number()) else {
        eprintln!("usage: copies SOCKET VRAM_MIB ROUNDS");
        return ExitCode::from(2);
    };
    let guest = match RemoteGuest::connect(&socket, u64::from(vram_mib) << 20) {
        Ok(guest) => guest,
        Err(error) => {
            eprintln!("copies: {}: {error}", socket.display());
            return ExitCode::FAILURE;
        }
    };
    let began = Instant::now();
    let mut driver = Driver::new(guest);
    println!("copies: the vGPU is initialized after {:.1} s", began.elapsed().as_secs_f64());
    if !driver.guest.map_ram(0, PAGES * PAGE, true) {
        eprintln!("copies: the device rejects the RAM");
        return ExitCode::FAILURE;
    }
    let mut channel = driver.channel(1);
    let source = driver.buffer(&channel, FROM, PAGES, 0);
    let target = driver.buffer(&channel, TO, PAGES, 0);
    driver.map(channel.space, RAM, At::Ram(0), PAGES);
    driver.flush();
    let bytes = (PAGES * PAGE) as u32;
    for round in 1..=rounds {
        for page in 0..PAGES {
            driver.guest.vram_write(source + page * PAGE, &rig::driver::pattern(round, page));
        }
        driver.submit(&mut channel, &[object(M2MF), m2mf_copy(FROM, TO, bytes), m2mf_copy(TO, RAM, bytes)].concat());
        if let Some(fault) = driver.wait_or_fault(&channel) {
            eprintln!("copies: round {round}: unit {} faulted at {:#x}", fault.unit, fault.va);
            return ExitCode::FAILURE;
        }
        if !driver.is_done(&channel) {
            eprintln!("copies: round {round}: {} disconnected", socket.display());
            return ExitCode::FAILURE;
        }
        if !driver.faults.is_empty() || !driver.vram_holds(target, PAGES, round) || !driver.ram_holds(0, PAGES, round) {
            eprintln!("copies: round {round} copied wrong data, with {} faults", driver.faults.len());
            return ExitCode::FAILURE;
        }
    }
    println!(
        "copies: {} bytes verified after {:.1} s",
        2 * u64::from(rounds) * PAGES * PAGE,
        began.elapsed().as_secs_f64()
    );
    ExitCode::SUCCESS
}

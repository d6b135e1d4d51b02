//! Uses as much card memory as possible beyond its account, through ordinary calls or by bypassing the library. Another
//! mode lists the visible cards. The `hostile` tests use this program.
//!
//! UNSAFETY: none; [`cuda_rig::Cuda`] makes the calls.

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand};
use cuda_rig::{Cuda, Failed, nvml};

/// Size of an allocation in bytes.
const STEP_BYTES: u64 = 2 << 20;

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Copy, Subcommand)]
enum What {
    /// Repeatedly maps memory that only the driver can provide and releases its handle, until an allocation fails or a
    /// limit is reached.
    Released {
        /// Maximum total size in MiB.
        #[arg(long, default_value_t = 96)]
        mib: u64,
    },
    /// Becomes a program of the tenant, and then calls the driver directly, bypassing the library.
    Past {
        /// Size of the memory in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Bypasses the library to occupy the card, and requests a turn meanwhile.
    Occupy {
        /// Duration in milliseconds.
        #[arg(long)]
        ms: u64,
    },
    /// Loads a module with large variables.
    Module {
        /// Total size of the variables in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Raises the context's limits that consume memory: stack, heap and `printf` buffer.
    Limits {
        /// Size of each limit in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Creates contexts.
    Contexts {
        /// Number of contexts.
        #[arg(long)]
        count: u64,
    },
    /// Allocates from a shareable pool until an allocation fails.
    Pool,
    /// Allocates managed memory until an allocation fails.
    Managed,
    /// Prints the visible cards as JSON, as found through the driver, through NVML, and by the UUIDs of the fake
    /// machine's cards.
    Cards,
}

fn main() -> Result<()> {
    let what = Args::parse().what;
    // numba, warp and ffmpeg open the library under both names, which must refer to the same library.
    let first = Cuda::load("libcuda.so")?;
    if let What::Cards = what {
        return cards(first);
    }
    let cuda = Cuda::open("libcuda.so.1")?;
    let mut taken = 0;
    let mut take = |most: u64, each: &mut dyn FnMut() -> Result<(), Failed>| -> Result<()> {
        while taken < most {
            match each() {
                Ok(()) => taken += 2,
                Err(Failed { code: 2, .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    };
    match what {
        What::Released { mib } => take(mib, &mut || {
            // Request compressed memory.
            let handle = cuda.create_of([1, 0, 1, 0, 0, 0, 1, 0], STEP_BYTES, 0)?;
            let at = cuda.map(handle, STEP_BYTES)?;
            cuda.set(at, 1, STEP_BYTES)?;
            cuda.release(handle)
        })?,
        What::Past { mib } => {
            let path = std::env::var(cuda_protocol::DRIVER_VARIABLE).context("the driver's path is missing")?;
            // This process already uses the card. Open the real driver by its path, because the loaded library has the
            // same name.
            let real = Cuda::open(&path)?;
            take(mib, &mut || real.alloc(STEP_BYTES).map(drop))?;
        }
        What::Occupy { ms } => {
            let word = cuda.alloc(4096)?;
            cuda.set(word, 0, 8)?;
            let path = std::env::var(cuda_protocol::DRIVER_VARIABLE).context("the driver's path is missing")?;
            let real = Cuda::open(&path)?;
            real.launch(real.kernel("spin")?, &[ms * 1000, word], real.stream()?)?;
            taken = ms;
            std::thread::spawn(move || {
                cuda.enter()?;
                cuda.launch(cuda.kernel("spin")?, &[1000, word], cuda.stream()?)
            });
        }
        What::Module { mib } => {
            cuda.module(&format!(".version 7.0\n.visible .global .align 8 .b8 big[{}];\n", mib << 20))?;
            taken = mib;
        }
        What::Limits { mib } => {
            // The stack limit applies to each of 1024 threads, and its first KiB is free. The other limits are totals.
            cuda.limit(0, 1024 + (mib << 10))?;
            cuda.limit(1, (mib << 20) + (1 << 20))?;
            cuda.limit(2, (mib << 20) + (8 << 20))?;
            taken = 3 * mib;
        }
        What::Contexts { count } => {
            for _ in 0..count {
                cuda.another_context()?;
            }
            taken = count;
        }
        What::Pool => {
            let pool = cuda.shared_pool()?;
            take(96, &mut || cuda.alloc_of(pool, STEP_BYTES).map(drop))?;
        }
        What::Managed => take(96, &mut || cuda.alloc_managed(STEP_BYTES).map(drop))?,
        What::Cards => {}
    }
    println!("{taken}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn cards(cuda: Cuda) -> Result<()> {
    let started = cuda.init();
    if let Err(error) = started {
        println!("{}", serde_json::json!({ "init": error.code }));
        return Ok(());
    }
    let count = cuda.count()?;
    let name = |uuid: [u8; 16]| String::from_utf8_lossy(&uuid).into_owned();
    let devices: Vec<_> =
        (0..count).map(|at| Ok((name(cuda.uuid_of(cuda.device(at)?)?), cuda.bus_id(at)?))).collect::<Result<_>>()?;
    let addresses = ["0000:01:00.0", "0000:02:00.0"].map(str::to_owned);
    let code = |result: Result<i32, Failed>| result.unwrap_or_else(|error| -error.code);
    let identities = [0, 1].map(|at| {
        let hex: String = format!("fake cuda card {at}").bytes().map(|byte| format!("{byte:02x}")).collect();
        format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    });
    let (shown, found) = nvml::cards(&[&addresses[..], &identities[..]].concat())?;
    let open = Cuda::open("libcuda.so.1")?;
    let result = |result: Result<(), Failed>| result.map_or_else(|error| error.code, |()| 0);
    let text = serde_json::json!({
        "devices": devices,
        "beyond": code(cuda.device(count)),
        "by_address": addresses.map(|address| code(cuda.by_bus_id(&address))),
        "nvml": shown,
        "nvml_found": found,
        "alloc": result(open.alloc(STEP_BYTES).map(drop)),
        "managed": result(open.alloc_managed(STEP_BYTES).map(drop)),
        "create": result(open.create_own(STEP_BYTES).map(drop)),
        "create_on_another": result(open.create_of([1, 0, 1, 1, 0, 0, 0, 0], STEP_BYTES, 0).map(drop)),
        "named": [
            result(cuda.uuid_of(1).map(drop)),
            result(cuda.bus_id(1).map(drop)),
            result(cuda.total_of(1).map(drop)),
            result(cuda.on(1).map(drop)),
        ],
        "variable": std::env::var("CUDA_VISIBLE_DEVICES").ok(),
    });
    println!("{text}");
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

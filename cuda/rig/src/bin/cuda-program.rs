//! A CUDA test program. It finds `libcuda.so.1` through the loader, runs a workload, and prints a checksum of all its
//! memory.
//!
//! The results depend only on the arguments, so runs under different conditions can be compared.

use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use clap::{Parser, Subcommand};
use cuda_rig::{Cuda, Ipc, attack, calls, copying, neighbour, nvml, own, printing, stall};

#[derive(Parser)]
struct Args {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Allocates memory, increments all words in several rounds, with launches and with a graph, and checks each word.
    Train {
        /// Total size of large allocations of 5 MiB each, in MiB.
        #[arg(long, default_value_t = 40)]
        mib: u64,
        /// Number of rounds.
        #[arg(long, default_value_t = 50)]
        rounds: u64,
        /// Additional card time per round, in microseconds.
        #[arg(long, default_value_t = 0)]
        spin_us: u64,
    },
    /// Keeps the card busy for a given wall time. Prints the card time that it got, in microseconds.
    Busy {
        /// Duration of one kernel in microseconds.
        #[arg(long)]
        kernel_us: u64,
        /// Wall time in milliseconds.
        #[arg(long)]
        ms: u64,
    },
    /// Keeps the card busy until end of file on standard input. For each line of input, prints the card time that it
    /// got, in microseconds.
    Count {
        /// Duration of one kernel in microseconds.
        #[arg(long)]
        kernel_us: u64,
        /// Submits to the per-thread default stream, one kernel at a time, and waits for each kernel.
        #[arg(long)]
        own: bool,
        /// Memory that the program also allocates, in MiB.
        #[arg(long, default_value_t = 0)]
        mib: u64,
    },
    /// Prints a line. After a line of input, makes an illegal access and prints the driver's error.
    Fault,
    /// Allocates memory until an allocation fails. Prints the total size in MiB.
    Fill {
        /// Size of one allocation in MiB.
        #[arg(long, default_value_t = 6)]
        step_mib: u64,
    },
    /// Randomly allocates and frees memory of all kinds and sizes.
    Churn {
        /// Number of steps.
        #[arg(long, default_value_t = 300)]
        steps: u64,
    },
    /// Creates a one-chunk handle in each of many threads concurrently.
    Burst {
        /// Number of threads.
        #[arg(long, default_value_t = 100)]
        threads: usize,
    },
    /// Alternately allocates and frees memory of five sizes in a stream, after a long kernel. Prints how often an
    /// allocation reused a previous address.
    Cycle {
        /// Number of rounds.
        #[arg(long, default_value_t = 5)]
        rounds: u64,
    },
    /// Allocates memory and waits until end of file on standard input.
    Hold {
        /// Size of the memory in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Like `hold`, but after a line of input, the library's thread no longer replies to the owner.
    Stall {
        /// Size of the memory in MiB.
        #[arg(long)]
        mib: u64,
    },
    /// Measures individual calls. Prints each call's duration in nanoseconds as JSON.
    Calls {
        /// Number of repetitions of each call.
        #[arg(long, default_value_t = 2000)]
        count: u32,
    },
    /// Works on all of its memory until end of file on standard input. For each line of input, allocates 4 MiB more and
    /// prints its progress.
    Live {
        /// Initial size of the memory in MiB.
        #[arg(long)]
        mib: u64,
        /// Maps its memory itself.
        #[arg(long)]
        own: bool,
    },
    /// Maps its memory itself at several addresses, and works on it while it creates and removes mappings.
    Own {
        /// Size of the memory in MiB.
        #[arg(long, default_value_t = 44)]
        mib: u64,
        /// Number of rounds.
        #[arg(long, default_value_t = 60)]
        rounds: u64,
        /// Additional card time per round, in microseconds.
        #[arg(long, default_value_t = 0)]
        spin_us: u64,
        /// Requests memory that can be exported and accessed through RDMA, as PyTorch does.
        #[arg(long)]
        shareable: bool,
    },
    /// Shares memory. Prints a handle. For each line of input, adds 1 to every word and prints the first word.
    Share {
        /// Size of the memory in KiB.
        #[arg(long)]
        kib: u64,
    },
    /// Opens memory that another process shares, and works on it like `share`. Prints the error code if the memory
    /// cannot be opened.
    Attach {
        /// Handle that `share` has printed.
        handle: String,
        /// Size of the memory in KiB.
        #[arg(long)]
        kib: u64,
    },
    /// Uses objects of all kinds that survive a restart of the program's worker, and checks all results. Prints a line
    /// for each round until end of file on standard input. A line of input creates an object: `event`, `mapping`,
    /// `array`, `address`, `pointer`, `pinned`, `unreadable`, `missing`, `pointers`, `heap`, `captured` or `capture`;
    /// `end` destroys them.
    Objects,
    /// Runs graphs that allocate memory. Prints the decrease in free memory in MiB, and the results of graphs that
    /// request too much.
    Graphs,
    /// Builds a graph from nodes, encodes a tensor map, and queries the occupancy of clusters. Prints the results.
    Nodes,
    /// Copies boxes and arrays, and uses textures and surfaces. Prints digests, array elements, and the results of
    /// invalid calls.
    Boxes,
    /// Builds graphs from kernels, copies and host functions, and prints their effects.
    Work,
    /// Registers its own memory and copies it. Prints the results.
    Register,
    /// Reads beyond the end of pinned memory. Only the guest library rejects this. Prints the results.
    Beyond,
    /// Copies memory after failed calls. Prints the number of reported failures, and true if later copies are right.
    FailedCopies,
    /// Links two inputs at run time. Prints the size and digest of the result.
    Link {
        /// Size of the first input in KiB.
        #[arg(long, default_value_t = 200)]
        kib: usize,
        /// Path of the second input.
        file: std::path::PathBuf,
    },
    /// For each line of input, prints properties that programs often query. The line `capture` first begins a capture,
    /// `end` ends it, and `copy` copies pageable memory in the captured stream.
    Facts,
    /// Prints the results of invalid calls, and of queries about memory that the program maps itself.
    Wrong,
    /// Maps memory itself until a request fails, frees the memory, and does both again. Prints the amount mapped in
    /// each round, in MiB.
    OwnFill {
        /// Size of the memory per handle, in MiB.
        #[arg(long, default_value_t = 6)]
        step_mib: u64,
    },
    /// Forks after the driver has been initialized. The child exits immediately, and the parent continues.
    Fork,
    /// Prints the results of `cuGetProcAddress` and of memory queries.
    Look,
    /// Keeps the card busy and requests memory until end of file on standard input. For each line of input, prints its
    /// progress since the previous line.
    Neighbour {
        /// Duration of one kernel in microseconds.
        #[arg(long, default_value_t = 500)]
        kernel_us: u64,
        /// Memory that the program keeps allocated, in MiB.
        #[arg(long, default_value_t = 8)]
        mib: u64,
        /// Interval between memory requests, in milliseconds.
        #[arg(long, default_value_t = 20)]
        ask_ms: u64,
    },
    /// Submits work, opens a capture, and prints a line. After a line of input, ends the capture, launches the captured
    /// work, and prints the card time of its work in microseconds.
    OpenCapture {
        /// Duration of one kernel in microseconds.
        #[arg(long)]
        kernel_us: u64,
        /// Number of kernels before the capture.
        #[arg(long)]
        kernels: u64,
        /// Stream of the work before the capture.
        #[arg(long, value_enum, default_value_t = Where::Other)]
        stream: Where,
        /// Number of kernels to submit one at a time in another stream during the capture, after a line of input.
        #[arg(long, default_value_t = 0)]
        beside: u64,
    },
    /// Prints the card's memory as reported by NVML, in MiB, and checks that a forked child gets the same result. Never
    /// calls the driver.
    Nvml,
    /// Loads a library from a file, and prints its functions' names and numbers of parameters.
    Names { file: std::path::PathBuf },
    /// Makes system calls in the driver's process through a kernel of the fake driver, and prints their results. Calls
    /// are separated by `/`. Each call consists of its number and up to six arguments: numbers, `last` for the previous
    /// call's result, `text:TEXT` for the address of a string, `unix:PATH` for the address of a socket address, and
    /// `program` for this program's process ID.
    #[command(allow_negative_numbers = true)]
    Syscalls {
        /// Words that describe the calls.
        #[arg(required = true)]
        words: Vec<String>,
    },
    /// For each line of input, launches a kernel that prints, waits for it, and prints the line: `context`, `stream`,
    /// `copy`, `many`, or `launch`, which does not wait.
    Printing,
    /// Prints the processes that NVML lists for the card. Never calls the driver.
    Processes,
}

/// Stream for the work before a capture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Where {
    /// A stream other than the captured one.
    Other,
    /// The default stream.
    Default,
    /// The per-thread default stream of the thread that opens the capture.
    Thread,
    /// The per-thread default stream of another thread.
    OtherThread,
    /// The captured stream.
    Same,
    /// A stream that is destroyed afterwards.
    Destroyed,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if matches!(args.what, What::Nvml) {
        return nvml_says();
    }
    if matches!(args.what, What::Processes) {
        return print(nvml::processes()?.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
    }
    let cuda = Cuda::open("libcuda.so.1")?;
    match args.what {
        What::Train { mib, rounds, spin_us } => train(cuda, mib, rounds, spin_us),
        What::Busy { kernel_us, ms } => busy(cuda, kernel_us, ms),
        What::Count { kernel_us, own, mib } => count(cuda, kernel_us, own, mib),
        What::Fault => print(attack::fault(cuda, &lines())?),
        What::Fill { step_mib } => fill(cuda, step_mib),
        What::Churn { steps } => churn(cuda, steps),
        What::Burst { threads } => print(own::burst(cuda, threads)?),
        What::Cycle { rounds } => cycle(cuda, rounds),
        What::Hold { mib } => hold(cuda, mib),
        What::Stall { mib } => stall(cuda, mib),
        What::Calls { count } => print(calls::measure(cuda, count)?.to_string()),
        What::Live { mib, own } => live(cuda, mib, own),
        What::Own { mib, rounds, spin_us, shareable } => {
            let property = if shareable { [1, 1, 1, 0, 0, 0, 1 << 8, 0] } else { [1, 0, 1, 0, 0, 0, 0, 0] };
            print(own::work(cuda, property, mib, rounds, spin_us)?)
        }
        What::Share { kib } => share(cuda, kib),
        What::Attach { handle, kib } => attach(cuda, &handle, kib),
        What::Objects => use_objects(cuda),
        What::Graphs => graphs(cuda),
        What::Syscalls { words } => attack::make(cuda, &words),
        What::Nodes => {
            let words = cuda.build_graph()?;
            print(format!("{words:x?} {} {}", cuda.encode_map()?, cuda.clusters(cuda.kernel("fill")?)?))
        }
        What::Boxes => print(format!("{:x?} {:x?}", cuda.copy_boxes()?, cuda.sample()?)),
        What::Work => print(format!("{:?}", cuda.build_work()?)),
        What::Register => {
            let found = cuda.register_memory()?;
            print(format!("{:?} {:?} {}", found.codes, found.kinds, found.is_equal))
        }
        What::Beyond => print(format!("{:?}", cuda.read_too_much()?)),
        What::FailedCopies => print(format!("{:?}", copying::after_failures(&cuda)?)),
        What::Link { kib, file } => link(cuda, kib, &file),
        What::Facts => facts(cuda),
        What::Wrong => print(own::wrong(cuda)?),
        What::OwnFill { step_mib } => print(own::fill(cuda, step_mib)?),
        What::Fork => fork(cuda),
        What::Look => look(cuda),
        What::OpenCapture { kernel_us, kernels, stream, beside } => {
            open_capture(cuda, kernel_us, kernels, stream, beside)
        }
        What::Neighbour { kernel_us, mib, ask_ms } => {
            neighbour::work(cuda, kernel_us, mib, Duration::from_millis(ask_ms), &lines())
        }
        What::Names { file } => print(format!("{:?}", cuda.name_functions(&file)?)),
        What::Printing => printing::work(cuda, &lines()),
        What::Nvml | What::Processes => nvml_says(),
    }
}

fn train(cuda: Cuda, mib: u64, rounds: u64, spin_us: u64) -> Result<()> {
    const EACH: u64 = 5 << 20;
    let words = EACH / 8 / 64;
    let (fill, add, sum, spin) =
        (cuda.kernel("fill")?, cuda.kernel("add")?, cuda.kernel("checksum")?, cuda.kernel("spin")?);
    let stream = cuda.stream()?;
    let result = cuda.alloc(4096)?;
    cuda.set(result, 0, 4096)?;
    let buffers: Vec<u64> = (0..(mib << 20) / EACH).map(|_| cuda.alloc(EACH)).collect::<Result<_, _>>()?;
    for (n, at) in buffers.iter().enumerate() {
        cuda.launch(fill, &[*at, words, n as u64], stream)?;
    }
    cuda.finish(stream)?;
    let graph =
        cuda.capture(stream, || buffers.iter().try_for_each(|at| cuda.launch(add, &[*at, words, 3], stream)))?;
    for round in 0..rounds {
        if round % 2 == 0 {
            cuda.graph(graph, stream)?;
        } else {
            buffers.iter().try_for_each(|at| cuda.launch(add, &[*at, words, round], stream))?;
        }
        if spin_us > 0 {
            cuda.launch(spin, &[spin_us, result], stream)?;
        }
        // Make a small stream-ordered allocation, and free it again.
        let small = cuda.alloc_async(1000, stream)?;
        cuda.launch(fill, &[small, 10, round], stream)?;
        cuda.free_async(small, stream)?;
    }
    let mut total = 0u64;
    for (n, at) in buffers.iter().enumerate() {
        cuda.launch(sum, &[*at, words, result + 8], stream)?;
        cuda.finish(stream)?;
        total = total.rotate_left(7) ^ cuda.read(result + 8, 1)?[0];
        let added = (0..rounds).fold(n as u64, |value, round| value + if round % 2 == 0 { 3 } else { round });
        let first = cuda.read(*at, 2)?;
        ensure!(first == [added, added + 1], "buffer {n} has {first:?} instead of {added}");
    }
    println!("{total:016x}");
    Ok(())
}

fn link(cuda: Cuda, kib: usize, file: &std::path::Path) -> Result<()> {
    let data: Vec<u8> = (0..kib << 10).map(|at| (at * 13 + at / 256) as u8).collect();
    let (linked, codes) = cuda.link(&data, file)?;
    ensure!(linked.starts_with(&data), "the result begins with the first input");
    let tail = linked.get(data.len()..).unwrap_or_default();
    print(format!("{} {} {codes:?}", linked.len(), String::from_utf8_lossy(tail)))
}

fn facts(cuda: Cuda) -> Result<()> {
    let (stream, function, at) = (cuda.stream()?, cuda.kernel("fill")?, cuda.alloc(1 << 20)? + 4096);
    println!("{:?}", cuda.facts(stream, function, at)?);
    for line in std::io::stdin().lines() {
        let result = match line?.as_str() {
            "capture" => cuda.begin(stream).map(|()| 0)?,
            "end" => cuda.end(stream),
            // One of the thread's next two calls returns the copy's error. While a capture is open, the first call
            // waits for a reply, and returns the error.
            "copy" => {
                let word = [7u64];
                let copied = cuda.copy(at, word.as_ptr().addr() as u64, 8, stream);
                let later = || cuda.facts(stream, function, at).map(drop);
                copied.and_then(|()| later()).and_then(|()| later()).err().map_or(0, |failed| failed.code)
            }
            _ => 0,
        };
        println!("{:?} {result}", cuda.facts(stream, function, at)?);
    }
    Ok(())
}

fn busy(cuda: Cuda, kernel_us: u64, ms: u64) -> Result<()> {
    let spin = cuda.kernel("spin")?;
    let stream = cuda.stream()?;
    let word = cuda.alloc(4096)?;
    cuda.set(word, 0, 8)?;
    let end = Instant::now() + Duration::from_millis(ms);
    while Instant::now() < end {
        cuda.launch(spin, &[kernel_us, word], stream)?;
    }
    println!("{}", cuda.read(word, 1)?[0]);
    Ok(())
}

fn count(cuda: Cuda, kernel_us: u64, own: bool, mib: u64) -> Result<()> {
    let lines = lines();
    for _ in 0..mib / 2 {
        cuda.alloc(2 << 20)?;
    }
    let spin = cuda.kernel("spin")?;
    let stream = if own { 2 } else { cuda.stream()? };
    let word = cuda.alloc(4096)?;
    cuda.set(word, 0, 8)?;
    loop {
        cuda.launch(spin, &[kernel_us, word], stream)?;
        if own {
            cuda.finish(stream)?;
        }
        match lines.try_recv() {
            Ok(_) => println!("{}", cuda.read(word, 1)?[0]),
            Err(std::sync::mpsc::TryRecvError::Empty) => {}
            Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
        }
    }
    println!("counted");
    Ok(())
}

/// Returns the lines of standard input as they arrive.
fn lines() -> std::sync::mpsc::Receiver<String> {
    let (lines, input) = std::sync::mpsc::channel();
    std::thread::spawn(move || std::io::stdin().lines().map_while(Result::ok).try_for_each(|line| lines.send(line)));
    input
}

fn use_objects(cuda: Cuda) -> Result<()> {
    let input = lines();
    let mut objects = cuda.objects()?;
    for round in 1u64.. {
        let sum = objects.round(cuda, round)?;
        println!("step {round} {sum}");
        match input.try_recv() {
            Ok(line) => {
                objects.obstruct(cuda, &line)?;
                println!("{line}");
            }
            Err(std::sync::mpsc::TryRecvError::Empty) => {}
            Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
        }
    }
    println!("done");
    Ok(())
}

fn open_capture(cuda: Cuda, kernel_us: u64, kernels: u64, place: Where, beside: u64) -> Result<()> {
    let lines = lines();
    let spin = cuda.kernel("spin")?;
    let word = cuda.alloc(4096)?;
    cuda.set(word, 0, 8)?;
    cuda.finish_all()?;
    // The default stream cannot be used while a stream that synchronizes with it is being captured.
    let captured = if place == Where::Default { cuda.blocking_stream()? } else { cuda.stream()? };
    let other = cuda.stream()?;
    let stream = match place {
        Where::Other | Where::Destroyed => other,
        Where::Default => 0,
        Where::Thread | Where::OtherThread => 2,
        Where::Same => captured,
    };
    let launch = move || (0..kernels).try_for_each(|_| cuda.launch(spin, &[kernel_us, word], stream));
    if place == Where::OtherThread {
        let launched = std::thread::spawn(move || cuda.enter().and_then(|()| launch()));
        launched.join().map_err(|_| anyhow::anyhow!("a thread panicked"))??;
    } else {
        launch()?;
    }
    if place == Where::Destroyed {
        cuda.destroy(other)?;
    }
    cuda.begin_capture(captured)?;
    cuda.launch(spin, &[1000, word], captured)?;
    println!("captures");
    lines.recv()?;
    if beside > 0 {
        let more = cuda.stream()?;
        (0..beside).try_for_each(|_| cuda.launch(spin, &[kernel_us, word], more))?;
        println!("launched");
        lines.recv()?;
    }
    let graph = cuda.end_capture(captured)?;
    cuda.graph(graph, captured)?;
    cuda.finish_all()?;
    println!("{}", cuda.read(word, 1)?[0]);
    Ok(())
}

fn fill(cuda: Cuda, step_mib: u64) -> Result<()> {
    let mut mib = 0;
    let error = loop {
        match cuda.alloc(step_mib << 20) {
            Ok(at) => cuda.set(at, 1, step_mib << 20)?,
            Err(error) => break error,
        }
        mib += step_mib;
        ensure!(mib < 1 << 20, "nothing refuses");
    };
    ensure!(error.code == 2, "{error}");
    println!("{mib}");
    Ok(())
}

fn churn(cuda: Cuda, steps: u64) -> Result<()> {
    let fill = cuda.kernel("fill")?;
    let stream = cuda.stream()?;
    let mut random = fastrand::Rng::with_seed(1);
    let mut live: Vec<(u64, u64, u64)> = Vec::new();
    for step in 0..steps {
        if live.len() > 12 || (random.u8(..4) == 0 && !live.is_empty()) {
            let (at, words, value) = live.swap_remove(random.usize(..live.len()));
            let mut ends = cuda.read(at, 1)?;
            ends.extend(cuda.read(at + 8 * (words - 1), 1)?);
            ensure!(ends == [value, value + words - 1], "step {step}: {ends:?} instead of {value} and on");
            let (base, bytes) = cuda.range(at + 8)?;
            ensure!(base == at && bytes >= words * 8, "step {step}: {base:#x} with {bytes} bytes instead of {at:#x}");
            if random.bool() { cuda.free(at)? } else { cuda.free_async(at, stream)? }
        } else {
            let bytes = if random.bool() { 64 + random.u64(..5000) * 8 } else { 8 + random.u64(..700_000) * 8 };
            let at = if random.bool() { cuda.alloc(bytes)? } else { cuda.alloc_async(bytes, stream)? };
            cuda.launch(fill, &[at, bytes / 8, step], stream)?;
            cuda.finish(stream)?;
            live.push((at, bytes / 8, step));
        }
    }
    println!("{}", live.len());
    Ok(())
}

fn cycle(cuda: Cuda, rounds: u64) -> Result<()> {
    const LENGTHS: u64 = 5;
    let (spin, fill, sum, stream) =
        (cuda.kernel("spin")?, cuda.kernel("fill")?, cuda.kernel("checksum")?, cuda.stream()?);
    let result = cuda.alloc(4096)?;
    let (mut addresses, mut again) = ([0; LENGTHS as usize], 0);
    cuda.launch(spin, &[300_000, result], stream)?;
    for round in 0..rounds {
        for (n, before) in (1..).zip(&mut addresses) {
            let at = cuda.alloc_async(n << 21, stream)?;
            cuda.launch(fill, &[at, 8, round * LENGTHS + n], stream)?;
            cuda.launch(sum, &[at, 8, result + 8 * n], stream)?;
            cuda.free_async(at, stream)?;
            again += u64::from(at == *before);
            *before = at;
        }
    }
    cuda.finish(stream)?;
    let sums = cuda.read(result + 8, LENGTHS as usize)?;
    ensure!(sums.windows(2).all(|pair| pair[0] != pair[1]), "work has accessed other memory: {sums:?}");
    println!("{again}");
    Ok(())
}

fn hold(cuda: Cuda, mib: u64) -> Result<()> {
    let at = cuda.alloc(mib << 20)?;
    cuda.set(at, 7, mib << 20)?;
    println!("holds");
    std::io::Read::read_to_end(&mut std::io::stdin(), &mut Vec::new())?;
    let words = cuda.read(at, 4)?;
    ensure!(words == [0x0707_0707_0707_0707; 4], "{words:x?}");
    let more = cuda.alloc(1 << 20)?;
    cuda.set(more, 1, 1 << 20)?;
    println!("held");
    Ok(())
}

fn stall(cuda: Cuda, mib: u64) -> Result<()> {
    let at = cuda.alloc(mib << 20)?;
    cuda.set(at, 7, mib << 20)?;
    println!("holds");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    stall::stop_answers()?;
    println!("stalled");
    std::io::Read::read_to_end(&mut std::io::stdin(), &mut Vec::new())?;
    Ok(())
}

fn print(line: String) -> Result<()> {
    println!("{line}");
    Ok(())
}

fn live(cuda: Cuda, mib: u64, own: bool) -> Result<()> {
    const EACH: u64 = 2 << 20;
    const WORDS: u64 = EACH / 8 / 64;
    let input = lines();
    let (fill, add) = (cuda.kernel("fill")?, cuda.kernel("add")?);
    let stream = cuda.stream()?;
    // Addresses of buffers, each with the expected value of its first word.
    let mut buffers: Vec<(u64, u64)> = Vec::new();
    let mut wanted = (mib << 20) / EACH;
    let mut step = 0u64;
    loop {
        while (buffers.len() as u64) < wanted {
            let at = if own { own::allocate(cuda, EACH)? } else { cuda.alloc(EACH)? };
            cuda.launch(fill, &[at, WORDS, step], stream)?;
            buffers.push((at, step));
        }
        for (at, value) in &mut buffers {
            cuda.launch(add, &[*at, WORDS, step], stream)?;
            *value += step;
        }
        cuda.finish(stream)?;
        for (n, (at, value)) in buffers.iter().enumerate() {
            let (first, last) = (cuda.read(*at, 1)?[0], cuda.read(*at + 8 * (WORDS - 1), 1)?[0]);
            ensure!(
                (first, last) == (*value, *value + WORDS - 1),
                "step {step}: buffer {n} has {first} and {last} instead of {value} and on"
            );
        }
        step += 1;
        println!("step {step} {}", buffers.len());
        match input.try_recv() {
            Ok(_) => wanted += 2,
            Err(std::sync::mpsc::TryRecvError::Empty) => {}
            Err(std::sync::mpsc::TryRecvError::Disconnected) => break,
        }
    }
    println!("held {}", buffers.len());
    Ok(())
}

fn share(cuda: Cuda, kib: u64) -> Result<()> {
    let words = kib * 128;
    // This part of the chunk precedes the shared memory, and is not shared.
    let before = cuda.alloc(4096)?;
    let at = cuda.alloc(kib << 10)?;
    cuda.launch(cuda.kernel("fill")?, &[at, words, 100], 0)?;
    cuda.finish(0)?;
    let handle = cuda.share(at)?;
    ensure!(cuda.share(at)? == handle, "a second request returns the same handle");
    let own = cuda.attach(handle).err().map(|error| error.code);
    ensure!(own == Some(201), "a process cannot open its own memory: {own:?}");
    println!("{}", handle.0.map(|word| format!("{word:016x}")).join(""));
    rounds(cuda, at, words)?;
    cuda.free(at)?;
    cuda.free(before)?;
    println!("freed");
    Ok(())
}

/// For each line of input, adds 1 to every word and prints the first word. Fails if the last word is inconsistent with
/// the first one.
fn rounds(cuda: Cuda, at: u64, words: u64) -> Result<()> {
    let add = cuda.kernel("add")?;
    for _ in lines() {
        cuda.launch(add, &[at, words, 1], 0)?;
        cuda.finish(0)?;
        let (first, last) = (cuda.read(at, 1)?[0], cuda.read(at + 8 * (words - 1), 1)?[0]);
        ensure!(last == first + words - 1, "{first} and {last}");
        println!("{first}");
    }
    Ok(())
}

fn attach(cuda: Cuda, handle: &str, kib: u64) -> Result<()> {
    let mut words = [0; 8];
    for (word, digits) in words.iter_mut().zip(handle.as_bytes().chunks(16)) {
        *word = u64::from_str_radix(std::str::from_utf8(digits)?, 16)?;
    }
    let handle = Ipc(words);
    let at = match cuda.attach(handle) {
        Ok(at) => at,
        Err(error) => {
            println!("{}", error.code);
            return Ok(());
        }
    };
    ensure!(cuda.attach(handle)? == at, "a second open returns the same address");
    let (base, bytes) = cuda.range(at + 8)?;
    ensure!(base == at && bytes >= kib << 10, "{at:#x} is in {bytes} bytes at {base:#x}");
    ensure!(cuda.share(at).err().map(|error| error.code) == Some(1), "the opened memory cannot be shared again");
    ensure!(cuda.free(at).is_err(), "a process that opened memory cannot free it");
    println!("{}", cuda.read(at, 1)?[0]);
    rounds(cuda, at, kib * 128)?;
    cuda.detach(at)?;
    cuda.detach(at)?;
    ensure!(cuda.detach(at).is_err(), "closed more often than opened");
    println!("closed");
    Ok(())
}

fn graphs(cuda: Cuda) -> Result<()> {
    const MIB: u64 = 1 << 20;
    let (fill, sum) = (cuda.kernel("fill")?, cuda.kernel("checksum")?);
    let stream = cuda.stream()?;
    let result = cuda.alloc(4096)?;
    let graph = |mib: u64| {
        cuda.capture(stream, || {
            let at = cuda.alloc_async(mib * MIB, stream)?;
            cuda.launch(fill, &[at, 1000, mib], stream)?;
            cuda.launch(sum, &[at, 1000, result], stream)?;
            cuda.free_async(at, stream)
        })
    };
    let run = |graph: u64| -> Result<u64, cuda_rig::Failed> {
        cuda.set(result, 0, 8)?;
        cuda.graph(graph, stream)?;
        cuda.finish(stream)?;
        Ok(cuda.read(result, 1)?[0])
    };
    let free = || cuda.info().map(|(free, _)| free / MIB);
    let code = |result: Result<u64, cuda_rig::Failed>| result.err().map_or(0, |error| error.code);
    let (before, small) = (free()?, graph(20)?);
    let first = run(small)?;
    let used = before - free()?;
    ensure!(run(small)? == first && before - free()? == used, "the second run uses more memory, or has another result");
    cuda.trim_graphs()?;
    ensure!(free()? == before, "the released memory is not free");
    ensure!(run(small)? == first, "the result differs after the memory was released");
    cuda.trim_graphs()?;
    let (large, held) = (graph(40)?, cuda.alloc(30 * MIB)?);
    let refused = code(run(large));
    ensure!(refused == 0 || free()? == before - 30, "memory of a refused graph is left");
    cuda.free(held)?;
    let later = code(run(large));
    // The graph exceeds this tenant's limit.
    let never = code(graph(80));
    println!("{used} {refused} {later} {never}");
    Ok(())
}

#[allow(unsafe_code, reason = "forks")]
fn fork(cuda: Cuda) -> Result<()> {
    let at = cuda.alloc(1 << 20)?;
    // SAFETY: the child makes one driver call and exits without running the parent's code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let _ = cuda.info();
        // SAFETY: as above.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: this process created the child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    ensure!(status == 0, "the child ended with {status}");
    cuda.set(at, 3, 1 << 20)?;
    println!("{:x}", cuda.read(at, 1)?[0]);
    Ok(())
}

fn look(cuda: Cuda) -> Result<()> {
    if cuda.lookup("cuMemAlloc", 12_000, 0)? == 0 {
        bail!("no cuMemAlloc");
    }
    let (free, total) = cuda.info()?;
    println!("free={} total={} device={}", free >> 20, total >> 20, cuda.total()? >> 20);
    Ok(())
}

#[allow(unsafe_code, reason = "forks")]
fn nvml_says() -> Result<()> {
    let said = nvml::memory()?;
    ensure!(said[0] == said[1], "the versions differ: {said:?}");
    // SAFETY: the child makes the same call on its only thread, and exits without running the parent's code.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let same = nvml::memory().is_ok_and(|again| again == said);
        // SAFETY: as above.
        unsafe { libc::_exit(i32::from(!same)) };
    }
    let mut status = 0;
    // SAFETY: this process created the child.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    ensure!(status == 0, "the child gets another result");
    println!("free={} total={}", said[0].0 >> 20, said[0].1 >> 20);
    Ok(())
}

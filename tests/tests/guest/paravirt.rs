//! Tests guests with the paravirtual driver alongside a guest with the stock driver on the same card. The paravirtual
//! driver manages page tables, channels and memory through calls. Also tests device memory shared between channels.

use anyhow::{Context, Result};
use gdev::{SegmentRequest, Target};
use tests::guest::{self, TRAPPED, card_toml, vm_toml};
use tests::wait::until;
use tests::{Daemon, Output, Vm, VmConfig};
use workloads::Random;

use super::stories::complaints;

/// Name of the VM with the vGPU that a host process uses.
const HOST: &str = "host";

/// Command for all workloads, at a size that an emulated guest completes in seconds.
const ALL: &str = "run /bin/gpu-workloads workload --name all --scale 1";

/// Returns the configuration table of a VM with the paravirtual interface.
pub(super) fn offered(name: &str, vram_mib: u32, more: &str) -> String {
    vm_toml(name, vram_mib) + &format!("paravirtual = {{ offered = true{more} }}\n")
}

/// Boots a guest with the paravirtual driver, and checks that the driver makes calls.
pub(super) fn boot(daemon: &Daemon, name: &str, kernel: &str) -> Result<Vm> {
    let config = VmConfig::new(name, tests::images()?, kernel)?.with_gpu(daemon.vm_socket(name)).paravirtual()?;
    let vm = Vm::launch(&config)?;
    vm.wait_ready()?;
    guest::load_driver(&vm)?;
    guest::await_counter(daemon, name, "pv_batches", |batches| batches > 0)?;
    Ok(vm)
}

fn verified(vm: &Vm, output: &Output) -> Result<()> {
    println!("VM {}:\n{}", vm.name(), output.text());
    let bad: Vec<_> = output.lines.iter().filter(|line| line.contains(" ok=false ")).collect();
    assert!(output.code == 0 && bad.is_empty(), "VM {}: {bad:?}", vm.name());
    assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new(), "VM {}", vm.name());
    Ok(())
}

#[test]
fn paravirtual_guests_of_both_kernels_run_with_a_stock_guest() -> Result<()> {
    // Trap the apertures of two VMs, so that the daemon counts their accesses.
    let vms = offered("old", 160, "") + TRAPPED + &offered("new", 160, "") + &vm_toml("stock", 160) + TRAPPED;
    let daemon = Daemon::start("knowing", |paths| card_toml(paths, 640) + &vms)?;
    let stock = Vm::launch(&VmConfig::new("stock", tests::images()?, "6.1")?.with_gpu(daemon.vm_socket("stock")))?;
    let vms = [boot(&daemon, "old", "6.1")?, boot(&daemon, "new", "6.12")?, stock];
    vms[2].wait_ready()?;
    guest::load_driver(&vms[2])?;
    // The paravirtual driver's TLB flushes are not trapped, and the driver transfers far fewer bytes through apertures.
    let count = |name: &str, counter: &str| guest::counter(&daemon, name, counter);
    let [known, stock] = [count("old", "aperture_bytes")?, count("stock", "aperture_bytes")?];
    println!("bytes through apertures until the driver is loaded: {known} by calls, {stock} by the stock driver");
    assert!(known * 2 < stock, "{known} of {stock} bytes");
    let runs = vms.iter().map(|vm| vm.start(ALL)).collect::<Result<Vec<_>>>()?;
    for (vm, run) in vms.iter().zip(runs) {
        verified(vm, &run.wait_within(guest::SMOKE_LIMIT)?)?;
        let shown = guest::show(&daemon, vm.name())?;
        assert_eq!(shown["denied_total"], 0, "{}", shown["denied"]);
        let counter = |name: &str| shown["counters"][name].as_u64();
        assert_eq!((counter("faults"), counter("hangs")), (Some(0), Some(0)));
        assert!(counter("pv_refused").is_none_or(|refused| refused == 0), "{}", shown["counters"]);
    }
    for vm in &vms[..2] {
        let smoke = guest::smoke(vm, "all --quick")?;
        assert!(smoke.bytes > 1 << 20, "{}", smoke.line);
        // Unbind the driver, after which no page tables may remain, and bind it again.
        vm.run_within("unbind", guest::LOAD_LIMIT)?.success()?;
        guest::await_counter(&daemon, vm.name(), "pv_tables", |tables| tables == 0)?;
        vm.run_within("bind", guest::LOAD_LIMIT)?.success()?;
        guest::smoke(vm, "copy --engine m2mf --from gart --to vram --size 65536")?;
        assert_eq!(complaints(&vm.kernel_log()?), Vec::<&str>::new(), "VM {}", vm.name());
    }
    Ok(())
}

fn makespan(line: &str) -> Result<u64> {
    let value = line.split_whitespace().find_map(|word| word.strip_prefix("makespan_us="));
    Ok(value.with_context(|| line.to_owned())?.parse()?)
}

#[test]
fn channels_share_segments_and_graphs_flow_through_them() -> Result<()> {
    let vms = ["one", "two"].map(|name| offered(name, 160, ", group = \"team\"")).concat();
    let vms = vms + &offered(HOST, 64, ", group = \"team\"");
    let daemon = Daemon::start("sharing", |paths| card_toml(paths, 512) + &vms)?;
    let (one, two) = (boot(&daemon, "one", "6.1")?, boot(&daemon, "two", "6.12")?);
    for vm in [&one, &two] {
        println!("{}", guest::smoke(vm, "share")?.line);
    }
    for kernel in ["madd", "mmul"] {
        for shape in ["tree", "rectangle"] {
            let run = |more: &str| guest::smoke(&one, &format!("dataflow --shape {shape} --kernel {kernel}{more}"));
            let (copied, shared) = (run("")?, run(" --share")?);
            println!("{}\n{}", copied.line, shared.line);
            assert!(copied.bytes > 0 && shared.bytes == copied.bytes);
            assert!(makespan(&copied.line)? > 0 && makespan(&shared.line)? > 0);
        }
    }
    // Exchange data between VMs: one VM shares memory, and the other opens it and replies.
    let put = one.start("run /bin/gpu-workloads share --what put --key 77 --seed 5 --duration 120")?;
    let got = (0..40).find_map(|_| guest::smoke(&two, "share --what get --key 77 --seed 5").ok());
    assert!(got.is_some_and(|got| got.ok), "the other machine found nothing");
    let put = guest::parse_smoke(&put.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(put.ok && put.bytes > 0, "{}", put.line);
    exchange_with_host(&daemon, &one)?;
    for vm in [&one, &two] {
        guest::await_counter(&daemon, vm.name(), "pv_attachments", |attachments| attachments == 0)?;
        vm.run_within("unbind", guest::LOAD_LIMIT)?.success()?;
    }
    Ok(())
}

/// Size in bytes of a segment in the guest command `share`.
const SEGMENT_BYTES: u64 = 256 << 10;

/// Returns the data written by the guest command `share`.
fn segment_data(seed: u64) -> Vec<u8> {
    Random::new(seed).words(SEGMENT_BYTES as usize / 4).iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Exchanges data between a VM and a host process that uses the vGPU [`HOST`]. Each shares memory once, and the other
/// opens it and replies.
fn exchange_with_host(daemon: &Daemon, vm: &Vm) -> Result<()> {
    let mut context = gdev::open(&Target::Vgpu(daemon.vm_socket(HOST)))?;
    let find = |key| SegmentRequest { group: true, group_writes: true, ..SegmentRequest::find(key, SEGMENT_BYTES) };
    let holds = |context: &mut gdev::Context, memory, expected: &[u8]| -> Result<bool> {
        let mut found = vec![0; SEGMENT_BYTES as usize];
        context.read(memory, 0, &mut found)?;
        Ok(found == expected)
    };
    let put = vm.start("run /bin/gpu-workloads share --what put --key 78 --seed 8 --duration 120")?;
    let attached = until("the guest's segment", guest::SMOKE_LIMIT, || {
        Ok(context.segment(find(78)).and_then(|segment| context.attach(segment, false)).ok())
    })?;
    until("the guest's data", guest::SMOKE_LIMIT, || {
        Ok(holds(&mut context, attached, &segment_data(8))?.then_some(()))
    })?;
    context.write(attached, 0, &segment_data(9))?;
    context.detach(attached)?;
    let put = guest::parse_smoke(&put.wait_within(guest::SMOKE_LIMIT)?)?;
    assert!(put.ok && put.bytes > 0, "{}", put.line);

    let segment = context.segment(SegmentRequest { create: true, ..find(79) })?;
    let attached = context.attach(segment, false)?;
    context.write(attached, 0, &segment_data(20))?;
    context.finish()?;
    assert!(guest::smoke(vm, "share --what get --key 79 --seed 20")?.bytes > 0);
    assert!(holds(&mut context, attached, &segment_data(21))?, "the guest's reply differs");
    context.remove(segment)?;
    context.detach(attached)?;
    guest::await_counter(daemon, HOST, "pv_attachments", |attachments| attachments == 0)
}

//! Tests programs with the guest library, whose workers are tenant programs. All programs are real processes on the
//! fake driver.
//!
//! The tests compare a program's output with that of a run directly on the driver.

mod support;

use std::process::{Command, Stdio};

use support::daemon::{self, Daemon};
use support::guest::Loopback;
use support::hostile::{account, until_accounts};
use support::{PROGRAM, Program, Rig, owner};

/// Runs a program that must succeed, and returns its output.
fn text(command: &mut Command) -> String {
    let output = command.output().expect("starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}{error}");
    // The library reports unsupported calls.
    assert!(!error.contains("not supported in a virtual machine"), "{error}");
    text
}

/// Returns the path of the CUDA runtime with the given major version.
fn runtime(version: u32) -> String {
    let folder = std::env::var("GPU_MEDIATOR_CUDA_RUNTIMES").expect("cargo xtask test --suite cuda names a folder");
    format!("{folder}/{version}/libcudart.so")
}

/// Runs a program that uses NVIDIA's runtime in a guest.
fn runs(version: u32) {
    let rig = Rig::new(256);
    let program = env!("CARGO_BIN_EXE_cuda-runtime");
    let plain = text(rig.command(program, "plain").arg(runtime(version)));
    let mut owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    assert_eq!(text(guest.command(&rig, program).arg(runtime(version))), plain);
    // The worker's last report may arrive after the program has exited.
    until_accounts(&mut owner, "its work passed the gate", |view| account(view, 0, "charged_ns") > 0);
    owner.end();
}

#[test]
fn runtime_of_cuda_11_works_in_a_guest() {
    runs(11);
}

#[test]
fn runtime_of_cuda_12_works_in_a_guest() {
    runs(12);
}

#[test]
fn runtime_of_cuda_13_works_in_a_guest() {
    runs(13);
}

#[test]
fn results_are_those_of_a_run_on_the_driver() {
    for arguments in [&["train", "--mib", "20", "--rounds", "10"][..], &["churn", "--steps", "100"], &["nodes"]] {
        let rig = Rig::new(256);
        let plain = text(rig.command(PROGRAM, "plain").args(arguments));
        let _owner = owner(&rig, 64, &[]);
        let guest = Loopback::start(&rig, "a");
        assert_eq!(text(guest.command(&rig, PROGRAM).args(arguments)), plain, "{arguments:?}");
    }
}

#[test]
fn boxes_arrays_textures_and_nodes_are_those_of_the_driver() {
    for arguments in [&["boxes"][..], &["work"]] {
        let rig = Rig::new(256);
        let plain = text(rig.command(PROGRAM, "plain").args(arguments));
        let _owner = owner(&rig, 64, &[]);
        let guest = Loopback::start(&rig, "a");
        for each_is_answered in ["0", "1"] {
            let mut command = guest.command(&rig, PROGRAM);
            let found = text(command.env("GPU_MEDIATOR_CUDA_SYNC", each_is_answered).args(arguments));
            assert_eq!(found, plain, "{arguments:?} {each_is_answered}");
        }
    }
}

#[test]
fn output_of_kernels_is_printed_when_the_driver_prints_it() {
    let rig = Rig::new(256);
    let mut plain = Program::start(rig.command(PROGRAM, "plain").arg("printing"));
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = Program::start(guest.command(&rig, PROGRAM).arg("printing"));
    // The last kernel prints more than fits into a pipe.
    for line in ["context", "stream", "copy", "launch", "stream", "many"] {
        let printed = program.print(line);
        assert_eq!(printed, plain.print(line), "{line}");
        assert_eq!(printed.is_empty(), line == "launch", "{line}");
    }
}

#[test]
fn registered_memory_is_copied_and_not_mapped() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let output = guest.command(&rig, PROGRAM).arg("register").output().expect("starts");
    // The results are, in order: null address; unknown flag; access by kernels; success; already registered; success;
    // device address of registered memory; address within a registration. Then the two device attributes: registration
    // is supported, but access through host pointers is not. Then two successful unregistrations, and a surplus one.
    // Then hints about managed memory, about addresses beyond it, and about other memory. While the memory is
    // registered, its type is host memory.
    let codes = "[1, 1, 801, 0, 712, 0, 801, 713, 1, 0, 0, 0, 713, 0, 1, 1]";
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.trim(), format!("{codes} [(0, 1), (1, 0)] true"));
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    for refused in ["cuMemHostRegister for access by kernels", "cuMemHostGetDevicePointer of registered memory"] {
        assert!(errors.contains(&format!("{refused} is not supported in a virtual machine")), "{errors}");
    }
}

#[test]
fn copy_fails_if_one_of_its_pieces_fails() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    assert_eq!(text(guest.command(&rig, PROGRAM).arg("beyond")).trim(), format!("{:?}", [1; 20]));
}

#[test]
fn failed_calls_leave_all_staging_buffers_to_later_copies() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    assert_eq!(text(guest.command(&rig, PROGRAM).arg("failed-copies")).trim(), "(64, true)");
}

#[test]
fn result_of_a_link_reaches_the_program_whole() {
    let rig = Rig::new(256);
    let file = rig.folder.path().join("second input");
    std::fs::write(&file, "of a file").expect("written");
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    // The fake driver's linker concatenates its inputs. An empty input is rejected.
    assert_eq!(text(guest.command(&rig, PROGRAM).arg("link").arg(&file)).trim(), "204809 of a file [1, 0]");
}

#[test]
fn facts_of_each_step_need_no_worker() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut program = Program::start(guest.command(&rig, PROGRAM).arg("facts"));
    let first = program.line();
    assert!(first.starts_with("[0, 0, ") && first.ends_with(", 8, 1]"), "{first}");
    let ask = |program: &mut Program, line: &str| {
        program.say(line);
        program.line()
    };
    let signal = |signal| {
        for pid in guest.workers() {
            let pid = rustix::process::Pid::from_raw(pid).expect("a process");
            rustix::process::kill_process(pid, signal).expect("sent");
        }
    };
    signal(rustix::process::Signal::STOP);
    assert_eq!(ask(&mut program, "again"), format!("{first} 0"), "the worker is stopped");
    signal(rustix::process::Signal::CONT);
    let captured = ask(&mut program, "capture");
    assert_eq!(captured, format!("{} 0", first.replacen("[0, 0,", "[1, 1,", 1)), "a query while a capture is open");
    let refused = ask(&mut program, "copy");
    assert_eq!(refused, captured.replacen("] 0", "] 900", 1), "a graph would read the message again");
    assert_eq!(ask(&mut program, "end"), format!("{first} 0"));
    assert_eq!(ask(&mut program, "copy"), format!("{first} 0"));
    signal(rustix::process::Signal::STOP);
    assert_eq!(ask(&mut program, "again"), format!("{first} 0"), "the capture has ended");
    signal(rustix::process::Signal::CONT);
    program.end();
}

#[test]
fn program_that_awaits_each_answer_loads_code_and_computes() {
    let arguments = ["train", "--mib", "20", "--rounds", "3"];
    let rig = Rig::new(256);
    let plain = text(rig.command(PROGRAM, "plain").args(arguments));
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    let mut command = guest.command(&rig, PROGRAM);
    assert_eq!(text(command.env("GPU_MEDIATOR_CUDA_SYNC", "1").args(arguments)), plain);
}

#[test]
fn graphs_of_nodes_and_tensor_maps_work() {
    let rig = Rig::new(256);
    let nodes = text(rig.command(PROGRAM, "plain").arg("nodes"));
    let (first, second, third) = ("1111111111111111", "2222222222222222", "3333333333333333");
    assert_eq!(nodes.trim(), format!("[{first}, {second}, {third}, {second}] true 66"));
}

#[test]
fn nvml_reports_the_tenants_memory_and_the_guests_programs() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 96, &[]);
    let (guest, other) = (Loopback::start(&rig, "a"), Loopback::start(&rig, "b"));
    // The program tests both versions of the call, in its own process and in a child. The total equals the tenant's
    // memory of 64 MiB.
    let memory = text(guest.command(&rig, PROGRAM).arg("nvml"));
    assert!(memory.contains("64"), "{memory}");
    assert!(!memory.contains("96") && !memory.contains("256"), "{memory}");

    let mut holder = Program::start(guest.command(&rig, PROGRAM).args(["hold", "--mib", "8"]));
    assert!(!holder.line().is_empty());
    let mut neighbour = Program::start(other.command(&rig, PROGRAM).args(["hold", "--mib", "8"]));
    assert!(!neighbour.line().is_empty());
    let listed = text(guest.command(&rig, PROGRAM).arg("processes"));
    assert_eq!(listed.trim(), holder.child.id().to_string(), "the process ID in the guest, and no other tenant's");
    holder.end();
    neighbour.end();
}

#[test]
fn full_window_refuses_pinned_memory_and_says_why() {
    let rig = Rig::new(256);
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start_with(&rig, "a", Stdio::inherit(), &["--window-gib", "1"]);
    let program = env!("CARGO_BIN_EXE_cuda-host");
    let output = guest.command(&rig, program).arg("fill").output().expect("starts");
    let error = String::from_utf8_lossy(&output.stderr);
    // Rings and staging memory occupy part of the window.
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "7", "{error}");
    assert_eq!(error.matches("128 MiB of pinned memory do not fit into the window").count(), 1, "{error}");
    assert!(error.contains("`cuda.window_mib`"), "{error}");
}

#[test]
fn lower_memory_size_applies_to_a_running_guest_program() {
    let rig = daemon::pair();
    let _daemon = Daemon::start(&rig);
    let guest = Loopback::under_daemon(&rig, "a");
    let mut program = Program::start(guest.command(&rig, PROGRAM).args(["live", "--mib", "24"]));
    program.steps(3);
    let mut neighbour = daemon::run(&rig, "b", &[], &["live", "--mib", "16"]);
    neighbour.steps(2);
    daemon::good(&rig, &["tenant", "set", "a", "--vram-mib", "8"]);
    daemon::until(&rig, "a", "memory beyond the size is evicted", |a| {
        (daemon::mib(a, "on_card_bytes"), daemon::mib(a, "in_host_bytes")) == (8, 16)
    });
    program.steps(3);
    // The tenant's programs do not get more memory.
    assert_eq!(text(guest.command(&rig, PROGRAM).arg("fill")).trim(), "0");
    daemon::good(&rig, &["tenant", "set", "a", "--vram-mib", "64"]);
    program.grow();
    daemon::until(&rig, "a", "its memory returns", |a| daemon::mib(a, "in_host_bytes") == 0);
    neighbour.steps(2);
    assert_eq!(neighbour.end(), "held 8");
    assert_eq!(program.end(), "held 14");
}

#[test]
fn names_of_functions_are_those_of_the_driver() {
    let rig = Rig::new(256);
    let file = rig.folder.path().join("image");
    std::fs::write(&file, "// an image\n.version 8.0\n.target sm_90\n").expect("written");
    let arguments = ["names".as_ref(), file.as_os_str()];
    let plain = text(rig.command(PROGRAM, "plain").args(arguments));
    assert!(plain.contains("(\"checksum\", 3), (\"checksum\", 3), (\"fill\", "), "{plain}");
    let _owner = owner(&rig, 64, &[]);
    let guest = Loopback::start(&rig, "a");
    for is_synchronous in ["0", "1"] {
        let mut command = guest.command(&rig, PROGRAM);
        let found = text(command.env("GPU_MEDIATOR_CUDA_SYNC", is_synchronous).args(arguments));
        assert_eq!(found, plain, "{is_synchronous}");
    }
}

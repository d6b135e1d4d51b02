//! NVIDIA's CUDA headers and runtime libraries, which are downloaded but never added to the sources, and benchmarks on
//! a real card.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::guests::BenchOptions;
use crate::run::{cargo, root, shown, target};

/// Wheels with headers: CUDA's major version, a header in the wheel, and the wheel's name and version.
const WHEELS: [(&str, &str, &str); 4] = [
    ("12", "cuda.h", "nvidia-cuda-runtime-cu12==12.9.79"),
    ("13", "cuda.h", "nvidia-cuda-runtime==13.5.37"),
    ("12", "nvml.h", "nvidia-nvml-dev-cu12==12.9.79"),
    ("13", "nvml.h", "nvidia-nvml-dev==13.5.37"),
];

/// Environment variable with the header folder, for the tests of `cuda-table`.
pub const HEADERS_VARIABLE: &str = "GPU_MEDIATOR_CUDA_HEADERS";

/// Wheels with NVIDIA's runtime library: CUDA's major version, and the wheel's name and version.
const RUNTIMES: [(&str, &str); 3] = [
    ("11", "nvidia-cuda-runtime-cu11==11.8.89"),
    ("12", "nvidia-cuda-runtime-cu12==12.9.79"),
    ("13", "nvidia-cuda-runtime==13.5.37"),
];

/// Environment variable with the runtime library folder, for the tests that load these libraries.
pub const RUNTIMES_VARIABLE: &str = "GPU_MEDIATOR_CUDA_RUNTIMES";

/// Downloads all files that the tests of the crates in `cuda` need.
pub fn fetch_all() -> Result<()> {
    headers()?;
    runtimes()?;
    Ok(())
}

/// Returns the folder with a `libcudart.so` for each version. Downloads missing versions.
pub fn runtimes() -> Result<PathBuf> {
    let folder = cache().join("cuda-runtimes");
    for (version, wheel) in RUNTIMES {
        let place = folder.join(version).join("libcudart.so");
        if !place.exists() {
            fetch_runtime(wheel, &place)
                .with_context(|| format!("cannot fetch the runtime library of CUDA {version} ({wheel})"))?;
        }
    }
    Ok(folder)
}

fn fetch_runtime(wheel: &str, place: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    let all = unpacked(wheel, work.path())?;
    let is_library = |name: &str| name.starts_with("libcudart.so");
    let library = find(&all, &is_library)?.context("the wheel has no libcudart.so")?;
    let folder = place.parent().context("the library has a folder")?;
    fs::create_dir_all(folder)?;
    // Rename the complete file into place, because another run may access the library concurrently.
    let part = tempfile::NamedTempFile::new_in(folder)?;
    fs::copy(library, part.path())?;
    part.persist(place)?;
    Ok(())
}

/// Returns the folder for files that are downloaded or created for tests.
fn cache() -> PathBuf {
    std::env::var_os("GPU_MEDIATOR_CACHE").map_or_else(|| root().join(".cache"), PathBuf::from)
}

/// Returns the folder with a header folder for each version. Downloads missing headers.
pub fn headers() -> Result<PathBuf> {
    let folder = cache().join("cuda-headers");
    for (version, header, wheel) in WHEELS {
        let place = folder.join(version);
        if !place.join(header).exists() {
            fetch(wheel, header, &place)
                .with_context(|| format!("cannot fetch the headers of CUDA {version} ({wheel})"))?;
        }
    }
    Ok(folder)
}

fn fetch(wheel: &str, header: &str, place: &Path) -> Result<()> {
    let work = tempfile::tempdir()?;
    let all = unpacked(wheel, work.path())?;
    let file = find(&all, &|name| name == header)?.with_context(|| format!("the wheel has no {header}"))?;
    let include = file.parent().context("a header has a folder")?;
    fs::create_dir_all(place)?;
    for entry in fs::read_dir(include)? {
        let path = entry?.path();
        let name = path.file_name().context("a file has a name")?;
        if path.is_file() && (name.to_string_lossy().starts_with("cuda") || name == header) {
            fs::copy(&path, place.join(name))?;
        }
    }
    Ok(())
}

/// Downloads a wheel and unpacks it in `work`. Returns the folder with the wheel's files.
fn unpacked(wheel: &str, work: &Path) -> Result<PathBuf> {
    let pip = ["-m", "pip", "download", "--quiet", "--no-deps", "--dest", "wheel", wheel];
    run(Command::new("python3").args(pip).current_dir(work))?;
    let file = fs::read_dir(work.join("wheel"))?.next().context("pip downloaded no wheel")??.path();
    run(Command::new("python3").args(["-m", "zipfile", "-e"]).arg(&file).arg("all").current_dir(work))?;
    Ok(work.join("all"))
}

/// Returns the first file with a matching name in `folder` or its subfolders.
fn find(folder: &Path, matches: &dyn Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            folders.push(path);
        } else if path.file_name().is_some_and(|name| matches(&name.to_string_lossy())) {
            return Ok(Some(path));
        }
    }
    for folder in folders {
        if let Some(found) = find(&folder, matches)? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.status().with_context(|| format!("{command:?}"))?;
    ensure!(status.success(), "{command:?} failed: {status}");
    Ok(())
}

/// Measures tenants that share a real card. Requires a GPU, NVIDIA's driver, and a `python3` with PyTorch, CuPy and
/// JAX.
pub fn bench(json: Option<&Path>) -> Result<bool> {
    let built = build(&[])?;
    let json = json.map_or_else(|| built.join("cuda-bench.json"), Path::to_owned);
    let mut command = Command::new("python3");
    command.arg(root().join("cuda/rig/gpu/bench.py")).arg(built).arg(std::path::absolute(json)?);
    shown(&mut command)
}

/// Runs `cuda/rig/gpu/NAME.py`, which measures programs on a real card. The scripts require a GPU, NVIDIA's driver, and
/// a `python3`. All scripts except for `disk` also require PyTorch, and `cards` requires two GPUs.
pub fn bench_with_options(name: &str, options: &BenchOptions) -> Result<bool> {
    let built = build(if name == "cards" { &["mediatord", "mediatorctl"] } else { &[] })?;
    let json = options.json.clone().unwrap_or_else(|| built.join(format!("cuda-{name}.json")));
    let mut command = Command::new("python3");
    command.arg(root().join("cuda/rig/gpu").join(name).with_extension("py")).arg("--build").arg(built);
    command.arg("--json").arg(std::path::absolute(json)?);
    if let Some(commit) = commit() {
        command.arg("--commit").arg(commit);
    }
    if let Some(rounds) = options.rounds {
        command.arg("--rounds").arg(rounds.to_string());
    }
    if let Some(seconds) = options.seconds {
        command.arg("--seconds").arg(seconds.to_string());
    }
    if let Some(only) = &options.only {
        command.arg("--only").arg(only);
    }
    shown(&mut command)
}

/// Returns the commit of the sources, or `None` outside a checkout.
fn commit() -> Option<String> {
    let output = Command::new("git").args(["rev-parse", "--short=8", "HEAD"]).current_dir(root()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Builds the packages that all benchmarks need and the `further` packages in release mode. Returns the program folder.
fn build(further: &[&str]) -> Result<PathBuf> {
    let packages = ["cuda-shim", "cuda-owner", "cuda-rig", "cuda-guest", "cuda-worker", "gdev-crypt"];
    let arguments = packages.iter().chain(further).flat_map(|name| ["-p", name]);
    if !shown(cargo(&["build", "--release"]).args(arguments))? {
        bail!("the programs of the benchmark cannot be built");
    }
    Ok(target().join("release"))
}

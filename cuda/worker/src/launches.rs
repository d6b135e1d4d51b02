//! Kernel launches, and the parameters of functions.

use cuda_calls::own::{
    self, ATTRIBUTE_WORDS, LAUNCH_WORDS, MAX_ATTRIBUTES, MAX_PARAMETER_BYTES, MAX_PARAMETERS, PLAIN_ATTRIBUTES,
};
use cuda_calls::{Fault, Handles as _, Kind};

use crate::driver::{INVALID_VALUE, NOT_SUPPORTED, Needed};
use crate::executor::{Broken, Executor, Parameters};
use crate::pending::Origin;

/// `CUlaunchConfig`.
#[repr(C)]
struct LaunchConfig {
    dimensions: [u32; 6],
    shared: u32,
    stream: u64,
    attributes: u64,
    attribute_count: u32,
}

/// Returns the lower and upper 32 bits of a word.
pub(crate) fn halves(word: u64) -> (u64, u64) {
    (word & 0xffff_ffff, word >> 32)
}

impl Executor {
    /// Replies with the offsets and sizes of a function's parameters, and stores them for launches.
    pub(crate) fn function_info(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let [handle] = *words else { return Err(Broken::Malformed) };
        let function = match self.objects.find(Kind::Function, handle) {
            Ok(function) => function,
            Err(Fault::Malformed) => return Err(Broken::Malformed),
            Err(Fault::Refused(code)) => {
                self.finish(origin, code, &[]);
                return Ok(());
            }
        };
        let parameters = match self.read_parameters(Needed::FunctionParameter, function) {
            Ok(found) if !found.is_empty() => Ok(found),
            // The function is a library's kernel, or has no parameters.
            first => self.read_parameters(Needed::KernelParameter, function).or(first),
        };
        match parameters {
            Ok(parameters) => {
                let mut results = vec![parameters.len() as u64];
                results.extend(parameters.iter().map(|(offset, size)| u64::from(*offset) | u64::from(*size) << 32));
                self.parameters.insert(handle, parameters);
                self.finish(origin, 0, &results);
            }
            Err(code) => self.finish(origin, code, &[]),
        }
        Ok(())
    }

    fn read_parameters(&self, call: Needed, function: u64) -> Result<Parameters, i32> {
        let mut parameters = Parameters::new();
        for index in 0..MAX_PARAMETERS as u64 {
            let (mut offset, mut size) = (0u64, 0u64);
            let places = [(&raw mut offset).addr() as u64, (&raw mut size).addr() as u64];
            let [first, second] = places;
            match self.driver.invoke(call, &[function, index, first, second]) {
                0 => {}
                // The index is beyond the last parameter.
                INVALID_VALUE => break,
                code if index == 0 => return Err(code),
                _ => break,
            }
            if offset.checked_add(size).is_none_or(|end| end > MAX_PARAMETER_BYTES as u64) {
                return Err(NOT_SUPPORTED);
            }
            parameters.push((offset as u32, size as u32));
        }
        Ok(parameters)
    }

    /// Returns pointers to a function's parameters in `bytes`.
    ///
    /// # Errors
    /// Returns an error if the guest has not queried the function's parameters, or if `bytes` is too short.
    pub(crate) fn parameter_pointers(&self, function: u64, bytes: &[u64]) -> Result<Vec<u64>, Broken> {
        // The guest must query the parameters before the first launch.
        let parameters = self.parameters.get(&function).ok_or(Broken::Malformed)?;
        let room = bytes.len() as u64 * 8;
        if parameters.iter().any(|(offset, size)| u64::from(*offset) + u64::from(*size) > room) {
            return Err(Broken::Malformed);
        }
        let base = bytes.as_ptr().addr() as u64;
        Ok(parameters.iter().map(|(offset, _)| base + u64::from(*offset)).collect())
    }

    /// Launches a function, or replies with its maximum number of active clusters.
    pub(crate) fn launch(&mut self, origin: Origin, words: &[u64]) -> Result<(), Broken> {
        let (head, rest) = words.split_at_checked(LAUNCH_WORDS).ok_or(Broken::Malformed)?;
        let [handle, first, second, third, fourth, stream, cooperative, parameter_words] = *head else {
            return Err(Broken::Malformed);
        };
        let ((grid_x, grid_y), (grid_z, block_x), (block_y, block_z)) = (halves(first), halves(second), halves(third));
        let (shared, count) = halves(fourth);
        let parameter_words = usize::try_from(parameter_words).map_err(|_| Broken::Malformed)?;
        let (bytes, attributes) = rest.split_at_checked(parameter_words).ok_or(Broken::Malformed)?;
        if count > MAX_ATTRIBUTES as u64 || attributes.len() as u64 != count * ATTRIBUTE_WORDS as u64 {
            return Err(Broken::Malformed);
        }
        if !attributes
            .chunks(ATTRIBUTE_WORDS)
            .all(|words| words.first().is_some_and(|id| PLAIN_ATTRIBUTES.contains(&(id & 0xffff_ffff))))
        {
            self.finish(origin, NOT_SUPPORTED, &[]);
            return Ok(());
        }
        let found =
            self.objects.find(Kind::Function, handle).and_then(|f| Ok((f, self.objects.find(Kind::Stream, stream)?)));
        let (function, stream) = match found {
            Ok(found) => found,
            Err(Fault::Malformed) => return Err(Broken::Malformed),
            Err(Fault::Refused(code)) => {
                self.finish(origin, code, &[]);
                return Ok(());
            }
        };
        let dimensions = [grid_x, grid_y, grid_z, block_x, block_y, block_z];
        let config = LaunchConfig {
            dimensions: dimensions.map(|dimension| dimension as u32),
            shared: shared as u32,
            stream,
            attributes: attributes.as_ptr().addr() as u64,
            attribute_count: count as u32,
        };
        let config_at = (&raw const config).addr() as u64;
        if origin.header.op == own::MAX_CLUSTERS {
            let mut clusters = 0i32;
            let code =
                self.driver.invoke(Needed::MaxClusters, &[(&raw mut clusters).addr() as u64, function, config_at]);
            self.finish(origin, code, &[u64::from(clusters.cast_unsigned())]);
            return Ok(());
        }
        // The guest must query the parameters before the first launch.
        let parameters = self.parameters.get(&handle).ok_or(Broken::Malformed)?;
        let room = bytes.len() as u64 * 8;
        if parameters.iter().any(|(offset, size)| u64::from(*offset) + u64::from(*size) > room) {
            return Err(Broken::Malformed);
        }
        let base = bytes.as_ptr().addr() as u64;
        let mut pointers: [u64; 64] = [0; 64];
        let mut more = Vec::new();
        let pointers = if let Some(room) = pointers.get_mut(..parameters.len()) {
            for (pointer, (offset, _)) in room.iter_mut().zip(parameters) {
                *pointer = base + u64::from(*offset);
            }
            room.as_ptr()
        } else {
            more.extend(parameters.iter().map(|(offset, _)| base + u64::from(*offset)));
            more.as_ptr()
        };
        let pointers = pointers.addr() as u64;
        let [gx, gy, gz, bx, by, bz] = dimensions;
        let code = if count > 0 {
            self.driver.invoke(Needed::LaunchEx, &[config_at, function, pointers, 0])
        } else if cooperative != 0 {
            self.driver.invoke(Needed::LaunchCooperative, &[function, gx, gy, gz, bx, by, bz, shared, stream, pointers])
        } else {
            self.driver.invoke(Needed::Launch, &[function, gx, gy, gz, bx, by, bz, shared, stream, pointers, 0])
        };
        self.finish(origin, code, &[]);
        Ok(())
    }
}

//! Opens a trace file and takes its compression off.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;

use crate::error::TraceError;

/// Bytes read ahead; also the most that format detection sees.
pub(crate) const HEAD: usize = 64 << 10;
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xB5, 0x2F, 0xFD];
const GZIP_MAGIC: [u8; 2] = [0x1F, 0x8B];
/// Largest zstd window accepted: 128 MiB, what `zstd --long` uses at most by default.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// The decompressed bytes of any stream, whether plain, gzip or zstd.
pub(crate) fn unpack(
    mut raw: impl BufRead + Send + 'static,
) -> std::io::Result<Box<dyn BufRead + Send>> {
    let head = raw.fill_buf()?;
    if head.starts_with(&ZSTD_MAGIC) {
        let mut decoder = zstd::Decoder::with_buffer(raw)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
        return Ok(Box::new(BufReader::with_capacity(HEAD, decoder)));
    }
    if head.starts_with(&GZIP_MAGIC) {
        let decoder = flate2::bufread::MultiGzDecoder::new(raw);
        return Ok(Box::new(BufReader::with_capacity(HEAD, decoder)));
    }
    Ok(Box::new(raw))
}

/// Opens a file; `-` is standard input.
pub(crate) fn open(path: &Path) -> Result<Box<dyn BufRead + Send>, TraceError> {
    let fail = |source| TraceError::Open {
        path: path.to_owned(),
        source,
    };
    let raw: Box<dyn Read + Send> = if path == Path::new("-") {
        Box::new(std::io::stdin())
    } else {
        Box::new(File::open(path).map_err(fail)?)
    };
    unpack(BufReader::with_capacity(HEAD, raw)).map_err(fail)
}

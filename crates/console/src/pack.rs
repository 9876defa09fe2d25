//! Compression of answers that are passed on.
//!
//! Only successful answers of the API to reading calls are compressed. They contain no secret of a
//! session and repeat nothing of a request, so their length discloses neither.

use std::io::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::Error;
use axum::body::{Body, Bytes, HttpBody};
use axum::http::{HeaderMap, HeaderValue, header};
use axum::response::Response;
use flate2::Compression;
use flate2::write::GzEncoder;
use hyper::body::Frame;

/// True if the client accepts gzip.
pub(crate) fn takes_gzip(headers: &HeaderMap) -> bool {
    headers
        .get(header::ACCEPT_ENCODING)
        .and_then(|v| v.to_str().ok())
        .is_some_and(|v| {
            v.split(',')
                .any(|word| word.trim() == "gzip" || word.trim().starts_with("gzip;q=1"))
        })
}

/// The same answer, compressed with gzip.
pub(crate) fn packed(response: Response) -> Response {
    let mut response = response.map(|body| {
        Body::new(Packed {
            body,
            gzip: Some(GzEncoder::new(Vec::new(), Compression::fast())),
        })
    });
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
    response
}

/// A body that is compressed as it passes. Only the state of the compressor is held, however long
/// the body is.
struct Packed {
    body: Body,
    /// `None` after the last frame.
    gzip: Option<GzEncoder<Vec<u8>>>,
}

impl HttpBody for Packed {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        let this = &mut *self;
        while let Some(mut gzip) = this.gzip.take() {
            let frame = match Pin::new(&mut this.body).poll_frame(context) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    this.gzip = Some(gzip);
                    return Poll::Pending;
                }
            };
            let Some(frame) = frame.transpose()? else {
                let rest = gzip.finish().map_err(Error::new)?;
                return Poll::Ready(Some(Ok(Frame::data(rest.into()))));
            };
            // Trailers are not passed on.
            let data = frame.into_data().unwrap_or_default();
            gzip.write_all(&data).map_err(Error::new)?;
            let out = std::mem::take(gzip.get_mut());
            this.gzip = Some(gzip);
            if !out.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
        Poll::Ready(None)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io::Read as _;

    use super::*;
    use http_body_util::BodyExt as _;

    /// A body that arrives in parts; `None` is a connection that breaks.
    struct Parts(VecDeque<Option<Bytes>>);

    impl HttpBody for Parts {
        type Data = Bytes;
        type Error = std::io::Error;

        fn poll_frame(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, std::io::Error>>> {
            let broke = || std::io::Error::from(std::io::ErrorKind::ConnectionReset);
            let part = self.0.pop_front();
            Poll::Ready(part.map(|part| part.map(Frame::data).ok_or_else(broke)))
        }
    }

    fn collected(parts: Vec<Option<Bytes>>) -> Result<Vec<u8>, Error> {
        let response = packed(Response::new(Body::new(Parts(parts.into()))));
        let runtime = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        let whole = runtime.block_on(response.into_body().collect())?;
        Ok(whole.to_bytes().to_vec())
    }

    #[test]
    fn body_in_parts_is_compressed_whole() {
        let line = "{\"name\":\"vm-1\",\"reads\":123456},";
        let part = Bytes::from(line.repeat(4000));
        for parts in [0, 1, 7] {
            let packed = collected(vec![Some(part.clone()); parts]).unwrap();
            let mut text = String::new();
            flate2::read::GzDecoder::new(&packed[..])
                .read_to_string(&mut text)
                .unwrap();
            assert!(text == line.repeat(4000 * parts), "{parts} parts");
            assert!(
                packed.len() < 100 + part.len() * parts / 20,
                "{parts} parts"
            );
        }
    }

    #[test]
    fn broken_body_stays_broken() {
        let part = Some(Bytes::from("[1, 2".repeat(1000)));
        assert!(collected(vec![part, None]).is_err());
    }
}

// What the kernels of a CTkvr selection share: their arguments, and what one request and KV head is.
#pragma once

#include "kernels/cuda/batch.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/units.cuh"
#include "products.cuh"

namespace kvseek {
namespace ctkvr {
namespace decode {

// A "task" is a request and a KV head: request * kv_heads + head.
struct StepArguments {
    const Number* queries;    // [batch, kv_heads * GROUP, DIM]
    const Request* requests;  // [batch]
    const int* table;         // [slots, max_extents]
    const Number* rows;       // the layer's row pool; host or device memory
    Number* centroids;        // [slots, kv_heads * GROUP, ring, DIM] queries less the mean, divided by their norms
    const float* means;       // [slots, kv_heads * GROUP, DIM] of the prompt's centroid queries; zeros: not subtracted
    float* offsets;           // [slots, kv_heads * GROUP, ring] products of the centroids, as stored, with the mean
    int* lists;               // [slots, kv_heads, ring, width] places in any order, -1 for none
    int* written;             // [slots, kv_heads] centroids that the ring ever received
    const int* prompted;      // [slots] of them, the prompt's: the first ones
    const int* listed;        // [slots] tokens of the prompt's region
    float* cosines;           // [tasks, ring] of the centroids with queries less the mean, the largest of the group
    int* recalled;            // [tasks, capacity] places, ascending
    int* counts;              // [tasks] of them
    float* scores;            // [tasks, capacity, GROUP] q·k of what is recalled; null: host cores compute them
    float2* statistics;       // [tasks, capacity / 16 rounded up, GROUP] largest exponent of 16 keys, sum of the powers
    unsigned* keys;           // [tasks, 2, capacity] what keys are ranked by; null: it fits into shared memory
    int* selected;            // [tasks, top_k] result
    int* host_recalled;       // [tasks, capacity] copies for the host, in pinned memory; null: none are wanted
    int* host_counts;         // [tasks]
    Number* host_queries;     // [batch, kv_heads * GROUP, DIM]
    int* host_slots;          // [batch]
    long long extent_stride;  // numbers from one extent of the pool to the next
    int batch, kv_heads, max_extents;
    int ring, width, capacity;
    int probes, prompt_probes, recent, top_k;
    float scale;  // softmax scale times log2(e): weights are powers of two
};

struct Task {
    int number, head;
    const Request& request;

    // The KV head is blockIdx.y.
    __device__ __forceinline__ Task(const Request* requests, int kv_heads, int owner)
        : number(owner * kv_heads + static_cast<int>(blockIdx.y)), head(blockIdx.y), request(requests[owner]) {}

    // Row of [slots, kv_heads, ...].
    __device__ __forceinline__ long long list(int kv_heads) const {
        return static_cast<long long>(request.slot) * kv_heads + head;
    }
    // Mean of the group's first head; the next head's is DIM numbers on.
    __device__ __forceinline__ const float* means(const float* all, int kv_heads) const {
        return all + list(kv_heads) * GROUP * DIM;
    }
    __device__ __forceinline__ const Number* queries(const Number* all) const {
        return all + static_cast<long long>(number) * GROUP * DIM;
    }
};

}  // namespace decode
}  // namespace ctkvr
}  // namespace kvseek
